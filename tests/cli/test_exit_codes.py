"""Each way to end, with its exit code; as text, and as the one JSON object of `--json`."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys

import pytest

from raywl import errors
from raywl.cli.outcome import UsageError, error_fields, exit_code
from raywl.cli.weights import import_factory


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("bug"), 1),
        (OSError("bug"), 1),
        (ValueError("sizes"), 2),
        (errors.CorruptFileError("path", None, "bad"), 3),
        (errors.MissingFileError("path", ["file"], "gone"), 3),
        (errors.MissingWeightsError("path", ["name"], "unset"), 3),
        (errors.ShapeMismatchError("name", (1,), (2,)), 3),
        (errors.CheckpointError("path", "name", "bad"), 3),
        (errors.NotFoundError("ref", "absent", local=True), 3),
        (errors.NotFoundError("ref", "absent"), 4),
        (errors.SourceError("ref", "down"), 4),
        (errors.AuthError("ref", "refused"), 4),
        (errors.OfflineError("ref", "offline"), 4),
        (errors.LockError("path", "held"), 5),
        (errors.CapacityError("CPUs", 4, 2, "too few"), 5),
        (errors.ClusterError("no cluster"), 5),
        (errors.NodeLostError("lost", node="10.0.0.2", rank=1), 5),
        (errors.StagingTimeout("late"), 5),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_each_class_has_its_code(error, code):
    assert exit_code(error) == code
    fields = json.loads(json.dumps(error_fields(error)))
    assert fields["class"] == type(error).__name__
    assert fields["message"]
    assert fields["exit_code"] == code


def test_an_error_carries_its_fields():
    fields = error_fields(errors.CapacityError("CPUs", 4, 2, "too few").at("rank 1 on node 10.0.0.2"))
    assert (fields["needed"], fields["available"], fields["where"]) == (4, 2, "rank 1 on node 10.0.0.2")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nonsense"],
        ["inspect"],
        ["inspect", "REF", "--nonsense"],
        ["plan", "REF", "--tp", "0"],
        ["plan", "REF", "--tp", "two"],
        ["bench"],
        ["bench", "load", "REF", "--cold", "--warm"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2(raywl, words):
    done = raywl(*words)
    assert (done.code, done.stdout) == (2, "")
    assert "usage: raywl" in done.stderr
    assert "Traceback" not in done.stderr
    assert raywl(*words, "--json").error["class"] == "UsageError"


@pytest.mark.parametrize("command", ["inspect", "verify", "plan", "load"])
def test_an_absent_path_is_3(raywl, tmp_path, command):
    done = raywl(command, tmp_path / "absent", "--json")
    assert done.code == 3
    assert done.error["class"] == "NotFoundError"
    assert str(tmp_path / "absent") in done.error["message"]


@pytest.mark.parametrize("command", ["inspect", "plan", "load"])
def test_a_damaged_file_is_3(raywl, damaged, command):
    """A `ValueError` by its class as well, but no matter of usage."""
    done = raywl(command, damaged, "--json")
    assert done.code == 3
    assert done.error["class"] == "CorruptFileError"
    assert done.error["path"] == str(damaged)
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback(raywl, damaged):
    assert "Traceback" in raywl("inspect", damaged, "--debug").stderr


def test_sizes_that_do_not_divide_are_2(raywl, checkpoint, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"layers.*.q_proj": "colwise"}))
    done = raywl("plan", checkpoint, "--tp", "3", "--tp-plan", plan, "--json")
    assert done.code == 2
    assert "8" in done.error["message"]
    done = raywl("plan", checkpoint, "--tp", "2", "--ep", "4", "--json")
    assert done.code == 2
    assert "ep_size 4" in done.error["message"]


def test_an_unknown_style_is_2(raywl, checkpoint, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"layers.*.q_proj": "sideways"}))
    done = raywl("plan", checkpoint, "--tp", "2", "--tp-plan", plan, "--json")
    assert done.code == 2
    assert "sideways" in done.error["message"]
    assert "colwise" in done.error["message"]


@pytest.mark.parametrize("text", [None, "not JSON", "[]", '{"a": 1}'])
def test_a_file_that_is_no_plan_is_2(raywl, checkpoint, tmp_path, text):
    plan = tmp_path / "plan.json"
    if text is not None:
        plan.write_text(text)
    done = raywl("plan", checkpoint, "--tp-plan", plan, "--json")
    assert done.code == 2
    assert str(plan) in done.error["message"]


@pytest.mark.parametrize("spec", ["model", ":factory", "absent_module:make", "model:absent", "model:NUMBER"])
def test_a_model_that_can_not_be_found(tmp_path, monkeypatch, spec):
    (tmp_path / "model.py").write_text("NUMBER = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "model", raising=False)
    with pytest.raises(UsageError, match=spec):
        import_factory(spec)
    sys.modules.pop("model", None)


def test_a_model_that_can_not_be_found_is_2(raywl, checkpoint):
    done = raywl("plan", checkpoint, "--model", "absent_module:make", "--json")
    assert done.code == 2
    assert "absent_module" in done.error["message"]


def test_a_report_that_can_not_be_written_is_2_before_anything_is_loaded(raywl, checkpoint, tmp_path):
    done = raywl("load", checkpoint, "--report", tmp_path / "absent" / "page.html", "--json")
    assert done.code == 2
    assert "no folder" in done.error["message"]


def test_a_bug_is_1_with_its_traceback(raywl, checkpoint, tmp_path):
    (tmp_path / "model.py").write_text("def make(context):\n    raise KeyError('mine')\n")
    done = raywl("plan", checkpoint, "--model", "model:make", "--json")
    assert done.code == 1
    assert done.error["class"] == "KeyError"
    assert "Traceback" in done.stderr
    assert "model.py" in done.stderr


def test_no_cluster_at_the_address_is_5(raywl, checkpoint):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    done = raywl("load", checkpoint, "--address", address, "--json")
    assert done.code == 5
    assert done.error["class"] == "ClusterError"
    assert address in done.error["message"]


def test_an_unknown_strategy_is_2(raywl, checkpoint):
    done = raywl("load", checkpoint, "--strategy", "sideways", "--json")
    assert done.code == 2
    assert "buffered" in done.error["message"]


def test_interrupted_is_130(checkpoint, tmp_path):
    """The interrupt arrives while the model is being made, which says so first."""
    (tmp_path / "model.py").write_text(
        "import threading\n"
        "def make(context):\n"
        "    print('making', flush=True)\n"
        "    threading.Event().wait(100)\n"
    )
    command = [sys.executable, "-m", "raywl", "plan", str(checkpoint), "--model", "model:make", "--json"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr.readline() == "making\n"
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads(stdout)["error"]["class"] == "KeyboardInterrupt"


def test_a_reader_that_has_seen_enough_is_no_failure(checkpoint, tmp_path):
    """`raywl inspect | head`: the pipe is closed before anything is written."""
    command = [sys.executable, "-m", "raywl", "inspect", str(checkpoint)]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        stderr = process.stderr.read()
        assert process.wait(timeout=60) == 0
    assert stderr == ""


def test_what_a_model_prints_is_not_in_the_result(raywl, checkpoint, tmp_path):
    """By Python's print, and by the file descriptor as native code does."""
    (tmp_path / "model.py").write_text(
        "import os, torch\n"
        "def make(context):\n"
        "    print('from python')\n"
        "    os.write(1, b'from below\\n')\n"
        "    return torch.nn.Module()\n"
    )
    done = raywl("plan", checkpoint, "--model", "model:make", "--json")
    assert done.code == 0
    assert done.json["nbytes"] == 0
    assert "from python" in done.stderr
    assert "from below" in done.stderr


def test_main_leaves_standard_output_to_its_caller(checkpoint, capsys):
    from raywl.cli import main

    assert main(["inspect", str(checkpoint), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_tensors"] == 4
    print("after")
    assert capsys.readouterr().out == "after\n"


def test_help_into_a_closed_pipe_is_no_failure(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-m", "raywl", "--help"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.close()
        stderr = process.stderr.read()
        assert process.wait(timeout=60) == 0
    assert stderr == ""
