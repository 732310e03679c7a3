"""Several processes and one cache, and what only shows in a process of its own."""

from __future__ import annotations

import json
import signal

import pytest

from raywl.errors import LockError
from raywl.locks import acquire_within, get_lock
from raywl.opening import open_checkpoint
from raywl.sources import pin
from tests.sources.conftest import FETCHED, OPEN, answer, sharded, start

EACH_ONCE = {f"org/name/{name}": 1 for name in FETCHED}


def test_four_processes_fetch_each_file_once(hub, tmp_path):
    """One downloads, the others wait and take what it brought."""
    commit = hub.add("org/name", sharded(rows=50_000))
    slow = hub.fail("/cdn/*model-00001*", "hang", times=1, after_bytes=1 << 16)
    processes = [start(hub, tmp_path, OPEN, "org/name", HF_HUB_USER_AGENT_ORIGIN=f"p{i}") for i in range(4)]
    # Nobody is done before all of them have asked the hub.
    hub.wait_for(4, "/api/models/org/name/*")
    assert slow.reached.wait(60)
    assert all(process.poll() is None for process in processes)
    slow.released.set()
    for process in processes:
        assert answer(process) == {"identity": f"hf:org/name@{commit}", "tensors": ["a", "b", "c"]}
    assert hub.downloads() == EACH_ONCE
    assert {request.client for request in hub.requests if request.path.startswith("/cdn/")} < {
        "p0", "p1", "p2", "p3",
    }  # fmt: skip


def test_two_caches_are_two_downloads(hub, tmp_path):
    """As of two nodes: the cache is what is filled once."""
    hub.add("org/name", sharded())
    processes = [start(hub, tmp_path / str(i), OPEN, "org/name") for i in range(2)]
    for process in processes:
        assert "identity" in answer(process)
    assert hub.downloads() == dict.fromkeys(EACH_ONCE, 2)


def test_another_one_finishes_what_a_killed_one_began(hub, tmp_path):
    commit = hub.add("org/name", sharded(rows=200_000))
    stuck = hub.fail("/cdn/*model-00001*", "hang", times=1, after_bytes=1 << 20)
    killed = start(hub, tmp_path, OPEN, "org/name")
    assert stuck.reached.wait(60)
    waiting = start(hub, tmp_path, OPEN, "org/name")
    killed.send_signal(signal.SIGKILL)
    assert killed.wait(30) == -signal.SIGKILL
    killed.stdout.close()
    killed.stderr.close()
    assert answer(waiting) == {"identity": f"hf:org/name@{commit}", "tensors": ["a", "b", "c"]}
    assert hub.downloads()["org/name/model-00001-of-00002.safetensors"] == 2
    assert hub.downloads()["org/name/model.safetensors.index.json"] == 1


def test_the_next_one_tries_when_one_fails(hub, tmp_path):
    """A failure of the one that downloads is not one of those that wait."""
    hub.add("org/name", sharded())
    hub.fail("/cdn/*model-00001*", "500", method="GET", times=1)
    answers = [answer(process) for process in [start(hub, tmp_path, OPEN, "org/name") for _ in range(3)]]
    assert sorted("error" in found for found in answers) == [False, False, True]
    (failed,) = [found for found in answers if "error" in found]
    assert failed["error"] == "SourceError"
    assert "model-00001" in str(failed["text"])


def test_a_wait_has_an_end(client, tmp_path):
    """The error names what was waited for, and who has it."""
    client.add("org/name", sharded())
    pinned = pin("org/name", timeout_s=0.2)
    code = (
        "import signal, sys\nfrom raywl.locks import *\n"
        "with acquire_within(get_lock('hf://org/name', sys.argv[1]), 5, 'x'):\n"
        "    print('held', flush=True); signal.pause()"
    )
    holder = start(client, tmp_path, code, str(tmp_path / "hub" / ".locks" / "raywl"))
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LockError, match=r"download of org/name@main: waited 0\.2 s") as caught:
            open_checkpoint(pinned)
        assert f"process {holder.pid} of " in caught.value.holder
    finally:
        holder.kill()
        holder.communicate()
    assert open_checkpoint(pinned).identity == pinned.identity


def test_no_lock_is_needed_for_what_is_there(client, tmp_path):
    client.add("org/name", sharded())
    open_checkpoint("org/name")
    with acquire_within(get_lock("hf://org/name", tmp_path / "hub" / ".locks" / "raywl"), 5, "test"):
        open_checkpoint(pin("org/name", timeout_s=0.1))


def test_environment_set_after_the_client_was_imported(hub, tmp_path):
    """C65: endpoint and offline flag are as they are when something is opened."""
    commit = hub.add("org/name", sharded())
    code = f"""
import json, os, huggingface_hub
os.environ["HF_ENDPOINT"] = {hub.url!r}
from raywl.opening import open_checkpoint
found = [open_checkpoint("org/name").identity]
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
found.append(open_checkpoint("org/name").identity)
print(json.dumps({{"found": found}}))
"""
    process = start(hub, tmp_path, code, HF_ENDPOINT="http://127.0.0.1:9")
    assert answer(process) == {"found": [f"hf:org/name@{commit}"] * 2}


def test_the_command_line_takes_repositories(hub, tmp_path):
    commit = hub.add("org/name", sharded())
    code = "import sys; from raywl.cli import main; sys.exit(main(['inspect', 'org/name', '--json']))"
    process = start(hub, tmp_path, code)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert json.loads(out)["identity"] == f"hf:org/name@{commit}"
