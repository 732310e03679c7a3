"""What is installed: the tree as it is, under `raywl` alone."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser

import pytest

import raywl
from tests.repository.imports import ROOT, modules

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the tree so that the tree stays clean."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("raywl", "actors"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for extra in ("tests", "examples", "docs"):
        (source / extra).mkdir()
        (source / extra / "__init__.py").touch()
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.iterdir()
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_wheel_is_the_tree(wheel):
    """Every module and data file of `raywl/` and `actors/` is in it, byte for byte, and nothing else."""
    expected = {}
    for folder, prefix in (("raywl", "raywl"), ("actors", "raywl/actors")):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                expected[f"{prefix}/{path.relative_to(ROOT / folder)}"] = path.read_bytes()
    found = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
    assert sorted(found) == sorted(expected)
    assert found == expected


def test_the_wheel_says_what_it_is(wheel):
    """Licence, readme, version, entry point and type marker come with it."""
    info = f"raywl-{raywl.__version__}.dist-info"
    meta = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    assert meta["Version"] == raywl.__version__
    assert meta["License-Expression"] == "Apache-2.0"
    assert meta["Requires-Python"] == ">=3.11"
    assert "# raywl" in meta.get_payload()
    assert b"Apache License" in wheel.read(f"{info}/licenses/LICENSE")
    assert "raywl = raywl.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert wheel.read(f"{info}/top_level.txt").split() == [b"raywl"]
    assert "raywl/py.typed" in wheel.namelist()


def test_packages_are_listed():
    """A package left out of the list is missing from what is installed, and nothing says so."""
    packages = {name for name, path in modules().items() if path.name == "__init__.py"}
    assert packages == set(PROJECT["tool"]["setuptools"]["packages"])


def test_no_package_called_actors_is_installed():
    """Installed files of raywl lie below `raywl`; the name `actors` is left to others."""
    code = """
import importlib.metadata, importlib.util
print([str(file) for file in importlib.metadata.files("raywl") if file.parts[0] == "actors"])
print(importlib.util.find_spec("actors"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd="/", timeout=60, check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == ["[]", "None"]


def test_actors_are_found_under_raywl():
    code = "import raywl.actors; print(raywl.actors.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd="/", timeout=120, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "raywl.actors"


def test_dependencies_have_lower_bounds():
    """Each says from which version on it is tested."""
    project = PROJECT["project"]
    wanted = [
        *project["dependencies"],
        *(row for rows in project["optional-dependencies"].values() for row in rows),
    ]
    for row in wanted:
        assert row.startswith(("raywl[", "types-")) or ">=" in row or "==" in row, row


def test_every_test_folder_is_a_package():
    """Otherwise two files of one name in two folders shadow each other."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        assert (path.parent / "__init__.py").exists(), path
