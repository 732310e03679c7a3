"""Where a model's quantisation config is, and what reads it."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from raywl.checkpoint.strict_json import parse_json
from raywl.errors import CorruptFileError, MissingFileError
from raywl.quant.registry import get_quantization_config
from raywl.sources.local import LocalSource
from raywl.sources.modelscope import maybe_download_from_modelscope
from raywl.sources.snapshots import fetch_top_level_files

__all__ = ["get_quant_config", "get_sparse_attention_config"]

_log = logging.getLogger(__name__)


def get_quant_config(model_config: Any, load_config: Any) -> Any:
    """The quantisation config of a model, read by the class that is registered for its method.

    The first of these that there is: `quantization_config` of the model's config, that of its text model,
    `compression_config`; the file, then the JSON text, that `hf_overrides` names
    (`quantization_config_file`, `quantization_config_dict_json`); nothing for bitsandbytes, which quantises
    while loading; the one JSON file of the model's folder whose name ends as the class says. A model's config
    is copied before anything reads it.

    Args:
        model_config: Has `quantization`, `model`, `hf_config`, and where they matter `revision` and
            `hf_overrides`.
        load_config: Has `download_dir`: the hub's cache, `None` for the client's own.

    Returns:
        What `from_config` of the class returns, or the class called without arguments where it wants no file.

    Raises:
        ValueError: No or an unknown `quantization`; overrides that are no dict; no file or several, or one
            of another producer; values that can't be.
        NotImplementedError: Overrides that the class has no method for.
        CorruptFileError: A file that isn't JSON.
        MissingFileError: A link that leads nowhere.
        RaywlError: The folder can't be found or downloaded, as `download_weights_from_hf`.
    """
    method = getattr(model_config, "quantization", None)
    if not method:
        raise ValueError("the model's config names no quantization method (quantization is not set)")
    quant_cls = get_quantization_config(method)
    written = _written_config(getattr(model_config, "hf_config", None), method)
    if written is not None and not (method == "modelopt_mixed" and _lacks_layers(written)):
        return quant_cls.from_config(written)
    overrides = getattr(model_config, "hf_overrides", {})
    if not isinstance(overrides, dict):
        raise ValueError(
            f"hf_overrides must be a dict to look for a quantization config in, not {overrides!r}"
        )
    for key, reader in (
        ("quantization_config_file", "from_config_file"),
        ("quantization_config_dict_json", "from_config_dict_json"),
    ):
        if (value := overrides.get(key)) is not None:
            if not hasattr(quant_cls, reader):
                raise NotImplementedError(f"hf_overrides has {key}, but {quant_cls.__name__} has no {reader}")
            return getattr(quant_cls, reader)(value)
    if method == "bitsandbytes":
        return quant_cls.from_config({})
    endings = tuple(quant_cls.get_config_filenames())
    if not endings:
        return quant_cls()
    path = _config_file(model_config, load_config, method, endings)
    config = _read_json(path)
    if method.startswith("modelopt"):
        producer = config.get("producer")
        found = producer.get("name") if isinstance(producer, Mapping) else producer
        if found != "modelopt":
            raise ValueError(f"{path}: made by {found!r}, but {method} needs a config of 'modelopt'")
    return quant_cls.from_config(config)


def get_sparse_attention_config(
    model_config: Any,
    load_config: Any,
    sparse_attention_config_filename: str = "sparse_attention_config.json",
) -> dict[str, Any]:
    """The JSON file of a model's folder that says which parts of attention are sparse.

    Args:
        model_config: Has `model` and, where that is a repository, `revision`.
        load_config: Has `download_dir`.
        sparse_attention_config_filename: The file's name.

    Returns:
        Empty where there is none.

    Raises:
        CorruptFileError: It isn't a JSON object.
        MissingFileError: It is no file, or a link that leads nowhere.
        RaywlError: The folder can't be found or downloaded, as `download_weights_from_hf`.
    """
    folder = _folder(
        model_config,
        load_config,
        [sparse_attention_config_filename],
        lambda name: name == sparse_attention_config_filename,
    )
    path = os.path.join(folder, sparse_attention_config_filename)
    if not os.path.lexists(path):
        return {}
    _log.info("sparse attention as %s says", path)
    return _read_json(path)


def _written_config(hf_config: Any, method: str) -> dict[str, Any] | None:
    """A copy of what the model's own config says, with the counts of heads where they are needed."""
    text_config = getattr(hf_config, "text_config", None)
    found = None
    for owner, name in (
        (hf_config, "quantization_config"),
        (text_config, "quantization_config"),
        (hf_config, "compression_config"),
    ):
        found = getattr(owner, name, None)
        if found is not None:
            break
    if found is None:
        return None
    config = _copied(found)
    is_compressed = "compressed-tensors" in (method, config.get("quant_method"))
    if is_compressed and "config_groups" in config:
        heads_of = hf_config if text_config is None else text_config
        num_heads = getattr(heads_of, "num_attention_heads", None)
        num_kv_heads = getattr(heads_of, "num_key_value_heads", None)
        config["total_num_heads"] = num_heads
        config["total_num_kv_heads"] = num_heads if num_kv_heads is None else num_kv_heads
    return config


def _copied(config: Any) -> dict[str, Any]:
    if not isinstance(config, Mapping) and hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise ValueError(f"the model's quantization config must be a dict, not {config!r}")
    # Deep, since readers take things out of what is inside, too.
    return copy.deepcopy(dict(config))


def _lacks_layers(config: dict[str, Any]) -> bool:
    inner = config.get("quantization")
    return "quantized_layers" not in config and not (
        isinstance(inner, Mapping) and "quantized_layers" in inner
    )


def _config_file(model_config: Any, load_config: Any, method: str, endings: tuple[str, ...]) -> str:

    def is_wanted(name: str) -> bool:
        return name.endswith(".json") and name.endswith(endings)

    folder = _folder(model_config, load_config, [f"*{ending}" for ending in endings], is_wanted)
    # A snapshot of which nothing was fetched has no folder.
    there = os.listdir(folder) if os.path.isdir(folder) else []
    found = sorted(n for n in there if is_wanted(n) and not os.path.isdir(os.path.join(folder, n)))
    if len(found) != 1:
        what = f"several config files: {', '.join(found)}" if found else "no config file"
        raise ValueError(f"{folder}: {method} has {what}; expected one that ends in {' or '.join(endings)}")
    return os.path.join(folder, found[0])


def _folder(
    model_config: Any, load_config: Any, patterns: list[str], is_wanted: Callable[[str], bool]
) -> str:
    """The model's folder, with those of its small files that are wanted."""
    model = model_config.model
    revision = getattr(model_config, "revision", None)
    cache_dir = getattr(load_config, "download_dir", None)
    model = maybe_download_from_modelscope(model, revision, cache_dir, allow_patterns=patterns) or model
    return fetch_top_level_files(model, is_wanted, cache_dir=cache_dir, revision=revision)


def _read_json(path: str) -> dict[str, Any]:
    folder, name = os.path.split(path)
    source = LocalSource(path, folder, name)
    size = source.size(name)
    if size is None:
        raise MissingFileError(folder, [name], "is no file, or a link leads nowhere")
    config = parse_json(source.read(name, 0, size), path, "config")
    if not isinstance(config, dict):
        raise CorruptFileError(path, None, f"config is no JSON object, but {type(config).__name__}")
    return config
