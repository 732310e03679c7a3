"""The page for users of vLLM's utilities is true: its names exist, and so do its tests."""

from __future__ import annotations

import ast
import re

import pytest

from raywl import parameters, weight_utils
from tests.repository.imports import ROOT

PAGE = ROOT / "docs" / "howto" / "coming-from-vllm.md"
_ROW = re.compile(
    r"^\| `(?P<name>\w+)`[^|]*\|[^|]+\|[^|]+\| `(?P<file>tests/\S+)::(?P<test>\w+)` \|$", re.MULTILINE
)

DIFFERENCES = {
    "atomic_writer": 2,
    "get_lock": 2,
    "download_weights_from_hf": 2,
    "convert_bin_to_safetensor_file": 3,
    "get_quant_config": 1,
    "safetensors_weights_iterator": 2,
    "multi_thread_safetensors_weights_iterator": 2,
    "np_cache_weights_iterator": 2,
    "_get_available_ram_bytes": 2,
    "_get_fs_type": 1,
    "_prefetch_all_checkpoints": 1,
    "default_weight_loader": 1,
    "storage_view": 1,
}
"""How many rows each has."""

ROWS = [(row["name"], row["file"], row["test"]) for row in _ROW.finditer(PAGE.read_text())]


def test_a_row_for_each_difference():
    found = [name for name, *_ in ROWS]
    assert {name: found.count(name) for name in found} == DIFFERENCES


@pytest.mark.parametrize(("name", "file", "test"), ROWS)
def test_its_test_exists(name, file, test):
    assert name in weight_utils.__all__ or name in parameters.__all__
    tree = ast.parse((ROOT / file).read_text())
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert test in functions


def test_names_of_the_page_are_names():
    """What it says to import can be imported."""
    for found in re.finditer(r"from raywl\.(\w+) import ([\w, ]+)", PAGE.read_text()):
        module = {"weight_utils": weight_utils, "parameters": parameters}.get(found[1])
        for name in filter(None, map(str.strip, found[2].split(","))):
            assert module is None or hasattr(module, name), name
