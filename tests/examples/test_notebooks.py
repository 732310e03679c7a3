"""The notebooks run from top to bottom in a kernel of their own, and are kept without what they showed."""

from __future__ import annotations

import sys

import pytest

from tests.examples.conftest import EXAMPLES

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))
named = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """The name of a kernel of the running Python, whatever else is installed as `python3`."""
    spec = pytest.importorskip("ipykernel.kernelspec", reason="ipykernel is not installed")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    name = "raywl-tests"
    spec.write_kernel_spec(str(tmp_path / "kernels" / name), overrides={"argv": spec.make_ipkernel_cmd()})
    return name


@named
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_it_runs(path, kernel, model_folder, tmp_path):
    """Its own assertions hold, and each report is shown as a page's part, not as text alone."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    notebook = read(path)
    work = tmp_path / "work"
    work.mkdir()
    # Each cell by itself has this long.
    resources = {"metadata": {"path": str(work)}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name=kernel, resources=resources).execute()
    assert not list(work.iterdir())
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        if cell.source.splitlines()[-1].endswith("report"):
            (shown,) = (output for output in cell.outputs if output.output_type == "execute_result")
            assert "<table" in shown.data["text/html"]


@named
def test_it_is_kept_clean(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        assert cell.execution_count is None
        assert not cell.outputs
        assert not cell.metadata


def test_the_kernel_is_the_running_python(kernel):
    manager = pytest.importorskip("jupyter_client.kernelspec").KernelSpecManager()
    assert manager.get_kernel_spec(kernel).argv[0] == sys.executable
