"""What `plan` and `load` put weights into: the user's model, or one empty parameter for each tensor."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from raywl.checkpoint import Manifest
from raywl.checkpoint.dtypes import torch_shape
from raywl.cli.outcome import UsageError
from raywl.errors import some_of
from raywl.types import ParallelContext, ShardSpec

__all__ = ["Cuts", "choose_cuts", "empty_factory", "import_factory", "read_tp_plan"]


@dataclass(slots=True)
class Cuts:
    """How each tensor is cut over the tensor-parallel ranks."""

    shards: dict[str, ShardSpec] = field(default_factory=dict)
    """By tensor name; the others are replicated."""
    source: str = ""
    """Where it comes from, in words."""

    def note(self, *, others: bool) -> str:
        """What the ranks hold, in a sentence.

        Args:
            others: Whether there are ranks of other kinds than tensor-parallel ones.
        """
        more = "; without a model, pipeline, data and expert ranks hold what their tp rank does"
        return f"one empty parameter for each tensor, {self.source}{more if others else ''}"


def choose_cuts(manifest: Manifest, tp_size: int, tp_plan_file: str | None) -> Cuts:
    """The cuts of the given plan, else of the checkpoint's `transformers` config class, else none.

    Raises:
        UsageError: The file can't be read or isn't a plan.
        ValueError: Styles that aren't supported; a dim that `tp_size` doesn't divide.
    """
    if tp_plan_file is not None:
        plan = read_tp_plan(tp_plan_file)
        return Cuts(_shards_of(plan, manifest, tp_size), f"cut by the tp_plan of {tp_plan_file}")
    if tp_size == 1:
        return Cuts({}, "whole: there is one tensor-parallel rank")
    return _cuts_of_config(manifest, tp_size)


def empty_factory(manifest: Manifest, cuts: Cuts) -> Callable[[ParallelContext], Any]:
    """A model factory that makes one empty parameter for each tensor, cut as `cuts` has it."""
    from raywl.empty_model import build_empty_model, describe_parameters

    return partial(build_empty_model, describe_parameters(manifest), cuts.shards)


def import_factory(spec: str) -> Callable[[ParallelContext], Any]:
    """The model factory that `MODULE:FACTORY` names; modules of the working directory are found too.

    Raises:
        UsageError: It isn't of that form, there is no such module or name, or it can't be called.
    """
    module_name, colon, attribute = spec.partition(":")
    if not (module_name and colon and attribute):
        raise UsageError(f"--model {spec!r} is not of the form MODULE:FACTORY")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ImportError as error:
        raise UsageError(f"--model {spec}: {error}") from error
    except AttributeError as error:
        raise UsageError(f"--model {spec}: {error}") from None
    if not callable(found):
        raise UsageError(f"--model {spec}: {attribute} can't be called")
    factory: Callable[[ParallelContext], Any] = found
    return factory


def read_tp_plan(path: str) -> dict[str, str]:
    """The tp_plan of a JSON file.

    Raises:
        UsageError: It can't be read, or isn't an object of strings.
    """
    try:
        with open(path, encoding="utf-8") as file:
            plan = json.load(file)
    except OSError as error:
        raise UsageError(f"--tp-plan {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"--tp-plan {path}: not JSON: {error}") from None
    if not isinstance(plan, dict) or not all(isinstance(style, str) for style in plan.values()):
        raise UsageError(f"--tp-plan {path}: not a JSON object of name pattern to style")
    return plan


def _shards_of(tp_plan: Mapping[str, str], manifest: Manifest, tp_size: int) -> dict[str, ShardSpec]:
    from raywl.loading.tp_plan import shards_from_tp_plan

    shapes = {name: torch_shape(entry.dtype, entry.shape) for name, entry in manifest.tensors.items()}
    return shards_from_tp_plan(tp_plan, shapes, tp_size)


def _cuts_of_config(manifest: Manifest, tp_size: int) -> Cuts:
    """The cuts of the checkpoint's config class; what has a style that isn't supported stays whole."""
    plan, source = _plan_of_config(manifest)
    if not plan:
        return Cuts({}, source)
    # After that, since it imports torch.
    from raywl.loading.tp_plan import STYLES

    left_out = {pattern: style for pattern, style in plan.items() if style not in STYLES}
    if left_out:
        rows = [f"{pattern} ({style})" for pattern, style in left_out.items()]
        source += f"; left whole, since the style isn't supported: {some_of(rows)}"
    known = {pattern: style for pattern, style in plan.items() if pattern not in left_out}
    return Cuts(_shards_of(known, manifest, tp_size), source)


def _plan_of_config(manifest: Manifest) -> tuple[dict[str, str], str]:
    size = manifest.source.size("config.json")
    if size is None:
        return {}, "whole on every rank: there is no config.json beside the weights"
    try:
        config = json.loads(manifest.source.read("config.json", 0, size))
        model_type = config["model_type"]
    except (ValueError, KeyError, TypeError):
        return {}, "whole on every rank: config.json names no model_type"
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        return {}, "whole on every rank: transformers, whose configs have tp_plans, is not installed"
    if model_type not in CONFIG_MAPPING:
        return {}, f"whole on every rank: transformers knows no model_type {model_type!r}"
    plan = getattr(CONFIG_MAPPING[model_type], "base_model_tp_plan", None)
    if not plan:
        return {}, f"whole on every rank: transformers has no tp_plan for model_type {model_type!r}"
    return dict(plan), f"cut by the tp_plan of the transformers config of {model_type!r}"
