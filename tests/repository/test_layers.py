"""Imports go down only, and what must stay light imports neither torch nor ray."""

import json
import subprocess
import sys

import pytest

from tests.repository.imports import imports, modules

LAYERS = [
    {"_version", "disk", "errors", "pace", "strategies", "timeline", "types", "text"},
    {"locks", "node", "progress"},
    {"sources"},
    {"checkpoint", "parameters"},
    {"html", "remap", "coordination", "quant", "caches"},
    {"loaders", "report", "stage_report"},
    {"plan"},
    {"readers", "tables"},
    {"iterators"},
    {"opening", "verifying"},
    {"loading", "writing"},
    {"saving", "weight_utils"},
    {"actors"},
    {"empty_model"},
    {"bench", "demo"},
    {"cli"},
    {"__main__"},
]
"""From the bottom up; parts of one layer may import each other only as `SIDEWAYS` says."""

SIDEWAYS = {("opening", "verifying")}
LIGHT = ["checkpoint", "coordination", "errors", "locks", "node", "plan", "quant", "sources", "text", "types"]
"""Parts that import neither torch nor ray, so that planning and inspecting start at once."""


def part(module: str) -> str:
    """The part of raywl that a module belongs to."""
    return module.split(".")[1] if "." in module else module


RANK = {name: i for i, layer in enumerate(LAYERS) for name in layer}


def test_every_part_has_its_layer():
    """A part that is added gets a place here."""
    assert {part(name) for name in modules()} - {"raywl"} <= set(RANK)


def test_imports_go_down():
    """No module imports a part above its own, nor a neighbour of the same layer."""
    wrong = []
    for found in imports():
        if found.importer == "raywl" or not found.target.startswith("raywl."):
            continue
        above, below = part(found.importer), part(found.target)
        if above != below and (above, below) not in SIDEWAYS and RANK[below] >= RANK[above]:
            wrong.append(str(found))
    assert not wrong


def test_ray_is_imported_by_actors_alone():
    """Whatever is below the actors works where ray isn't installed."""
    users = {part(found.importer) for found in imports() if found.target.split(".")[0] == "ray"}
    assert users == {"actors"}


def test_light_parts_import_no_torch_with_themselves():
    wrong = [
        str(found)
        for found in imports()
        if part(found.importer) in LIGHT
        and found.at_module_level
        and found.target.split(".")[0] in ("torch", "ray", "numpy", "transformers")
    ]
    assert not wrong


def test_actors_are_imported_by_one_name():
    """`import actors` would make a second copy of every class."""
    assert not [str(found) for found in imports() if found.target.split(".")[0] == "actors"]
    assert "actors" not in sys.modules


def in_a_new_process(code: str) -> dict:
    """What a script prints as JSON, in a process with nothing imported."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("module", ["raywl", *[f"raywl.{name}" for name in LIGHT]])
def test_light_imports(module):
    """Nothing heavy comes with it, also by way of others."""
    code = f"import sys, json, {module}; print(json.dumps(sorted(set(m.split('.')[0] for m in sys.modules))))"
    heavy = {
        "torch",
        "ray",
        "numpy",
        "transformers",
        "huggingface_hub",
        "s3fs",
        "fsspec",
        "safetensors",
        "rich",
    }
    assert heavy.isdisjoint(in_a_new_process(code))


def test_import_starts_nothing():
    """Importing every part starts no thread and no process, and changes no setting of the process."""
    code = f"""
import importlib, json, os, signal, sys, threading, warnings, logging
import torch, ray, psutil
def state():
    return [
        threading.active_count(), len(psutil.Process().children()), dict(os.environ), os.getcwd(),
        str(signal.getsignal(signal.SIGINT)), torch.get_num_threads(), str(torch.get_default_dtype()),
        len(warnings.filters), [str(h) for h in logging.getLogger().handlers],
    ]
before = state()
for name in {sorted(set(modules()) - {"raywl.__main__"})!r}:
    importlib.import_module(name)
assert not ray.is_initialized()
print(json.dumps([before, state()]))
"""
    before, after = in_a_new_process(code)
    assert before == after


def test_a_checkpoint_loads_where_ray_is_not_installed(tmp_path):
    """The core needs no ray: opening, planning and loading work with its import made to fail."""
    code = f"""
import sys, json
sys.modules["ray"] = None
import torch, safetensors.torch, raywl
path = {str(tmp_path / "model.safetensors")!r}
model = torch.nn.Linear(4, 2)
safetensors.torch.save_file(model.state_dict(), path)
loaded = torch.nn.Linear(4, 2)
report = raywl.load_into(loaded, path)
plan = raywl.open_checkpoint(path).plan()
assert torch.equal(loaded.weight, model.weight) and torch.equal(loaded.bias, model.bias)
print(json.dumps([sorted(report.loaded), plan.nbytes]))
"""
    assert in_a_new_process(code) == [["bias", "weight"], 40]
