"""`raywl load` on a real local cluster."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys

import psutil


def test_load_reports_every_rank(raywl, checkpoint, tmp_path):
    """Two ranks without a model, cut by a plan; the report page; one JSON object and lines of progress."""
    plan, page = tmp_path / "plan.json", tmp_path / "report.html"
    trace = ("--trace", tmp_path / "trace.json")
    plan.write_text(json.dumps({"layers.*.q_proj": "colwise", "layers.*.o_proj": "rowwise"}))
    words = ("--release-page-cache", "--tp", "2", "--tp-plan", plan, "--report", page, *trace, "--json")
    done = raywl("load", checkpoint, *words)
    assert done.code == 0, done.stderr
    found = done.json
    assert [rank["bytes_loaded"] for rank in found["ranks"]] == [172, 172]
    assert [len(rank["loaded"]) for rank in found["ranks"]] == [4, 4]
    assert found["missing"] == found["unexpected"] == []
    assert found["report_path"] == str(page)
    assert str(plan) in found["notes"][0]
    assert any(note.startswith("page cache: ") for note in found["notes"])
    assert "100 %" in done.stderr
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    text = page.read_text()
    assert "&lt;script&gt;[red]" in text
    assert "<script>" not in text


def test_load_into_a_model_of_the_working_directory(raywl, checkpoint, tmp_path):
    """In words, and quietly; what the checkpoint has and the model has no place for is named."""
    (tmp_path / "my_model.py").write_text(
        "import torch\n"
        "def make(context):\n"
        "    model = torch.nn.Module()\n"
        "    layer = torch.nn.Linear(4, 8, bias=False, device='meta')\n"
        "    model.layers = torch.nn.ModuleList([torch.nn.ModuleDict({'q_proj': layer})])\n"
        "    return model\n"
    )
    done = raywl("load", checkpoint, "--model", "my_model:make", "--quiet")
    assert done.code == 0, done.stderr
    assert "1 ranks, 128 B read, 128 B kept" in done.stdout
    assert "without a place: layers.1.q_proj.weight" in done.stdout
    assert "100 %" not in done.stderr
    assert "raywl: warning: 3 tensors that have no place" in done.stderr


def test_what_fails_on_a_rank_keeps_its_class(raywl, checkpoint, tmp_path):
    """A parameter that the checkpoint lacks: exit code 3, with the rank and the name."""
    (tmp_path / "my_model.py").write_text(
        "import torch\ndef make(context):\n    return torch.nn.Linear(4, 8, device='meta')\n"
    )
    done = raywl("load", checkpoint, "--model", "my_model:make", "--json", "--quiet")
    assert done.code == 3, done.stderr
    assert done.error["class"] == "MissingWeightsError"
    assert done.error["names"] == ["weight", "bias"]
    assert "rank 0" in done.error["where"]


def test_an_interrupted_load_leaves_nothing_behind(checkpoint, tmp_path):
    """The interrupt arrives while a rank makes its model, which tells the driver by a file."""
    (tmp_path / "my_model.py").write_text(
        "import os, threading\n"
        f"PIPE = {str(tmp_path / 'pipe')!r}\n"
        "def make(context):\n"
        "    with open(PIPE, 'w') as pipe:\n"
        "        pipe.write(str(os.getpid()))\n"
        "    threading.Event().wait(100)\n"
    )
    os.mkfifo(tmp_path / "pipe")
    command = [sys.executable, "-m", "raywl", "load", str(checkpoint), "--model", "my_model:make", "--json"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        # Open for both, so that neither opening nor a rank that never writes blocks for ever.
        pipe = os.open(tmp_path / "pipe", os.O_RDWR)
        told, _, _ = select.select([pipe], [], [], 100)
        if not told:
            process.kill()
        assert told, process.communicate()
        rank = psutil.Process(int(os.read(pipe, 32)))
        os.close(pipe)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=100)
    assert process.returncode == 130, stderr
    assert json.loads(stdout)["error"]["class"] == "KeyboardInterrupt"
    assert "Traceback" not in stderr
    assert psutil.wait_procs([rank], timeout=30)[1] == []
