"""Several processes and one cache, and what only shows in a process of its own."""

from __future__ import annotations

import json
import signal
import socket

import pytest

from raywl.errors import LockError
from raywl.locks import acquire_within, get_lock
from raywl.opening import open_checkpoint
from raywl.sources import pin
from raywl.sources.hub import HubPin
from tests.sources.conftest import FETCH, FETCHED, answer, sharded, spans_left, start, until

INDEX = "model.safetensors.index.json"
ROWS = 50_000
"""Of tensors so that a file is much larger than what is read of it for its header."""
HEADER = 64 << 10
"""Bytes that no request for a header asks for."""
EACH_ONCE = {f"org/name/{name}": 1 for name in FETCHED}


def range_of(request):
    start, _, end = request.range.removeprefix("bytes=").partition("-")
    return int(start), int(end) + 1


def pinned_offline(home, commit):
    """The checkpoint as another process's cache has it."""
    return open_checkpoint(HubPin("org/name", commit, cache_dir=str(home / "hub"), offline=True))


def test_four_processes_fetch_each_file_once(hub, tmp_path):
    """One downloads, the others wait and take what it brought."""
    commit = hub.add("org/name", sharded(ROWS))
    slow = hub.fail("/cdn/*model-00001*", "hang", times=1, after_bytes=1 << 16, of_bytes=HEADER)
    processes = [start(hub, tmp_path, FETCH, "org/name", HF_HUB_USER_AGENT_ORIGIN=f"p{i}") for i in range(4)]
    # Nobody is done before all of them have looked at the headers.
    until(lambda: len(hub.clients("/cdn/org/name/model-*")) == 4, 120)
    assert slow.reached.wait(120)
    assert all(process.poll() is None for process in processes)
    slow.released.set()
    for process in processes:
        assert answer(process) == {"identity": f"hf:org/name@{commit}", "tensors": ["a", "b", "c"]}
    downloads = hub.downloads()
    # Each opened it by its index.
    assert downloads.pop(f"org/name/{INDEX}") in range(1, 5)
    assert downloads == {name: 1 for name in EACH_ONCE if not name.endswith(INDEX)}
    data = [r for r in hub.requests if r.path.startswith("/cdn/") and r.num_bytes > HEADER]
    assert len({request.client for request in data}) == 1


def test_two_caches_are_two_downloads(hub, tmp_path):
    """As of two nodes: the cache is what is filled once."""
    hub.add("org/name", sharded())
    processes = [start(hub, tmp_path / str(i), FETCH, "org/name") for i in range(2)]
    for process in processes:
        assert "identity" in answer(process)
    assert hub.downloads() == dict.fromkeys(EACH_ONCE, 2)


def test_another_one_finishes_what_a_killed_one_began(hub, tmp_path):
    """From what is there: no byte that the killed one had written is fetched again."""
    files = sharded(ROWS)
    commit = hub.add("org/name", files)
    stuck = hub.fail("/cdn/*model-00001*", "hang", times=1, after_bytes=1 << 20, of_bytes=HEADER)
    killed = start(hub, tmp_path, FETCH, "org/name", HF_HUB_USER_AGENT_ORIGIN="k")
    assert stuck.reached.wait(120)
    waiting = start(hub, tmp_path, FETCH, "org/name", HF_HUB_USER_AGENT_ORIGIN="w")
    until(lambda: "w" in hub.clients("/cdn/org/name/model-*"), 120)
    size = len(files["model-00001-of-00002.safetensors"])
    written = until(lambda: spans_left(tmp_path, size, at_least=1 << 19))
    killed.send_signal(signal.SIGKILL)
    assert killed.wait(30) == -signal.SIGKILL
    killed.stdout.close()
    killed.stderr.close()
    assert answer(waiting) == {"identity": f"hf:org/name@{commit}", "tensors": ["a", "b", "c"]}
    assert not list(tmp_path.rglob("*.incomplete*"))
    asked = [
        range_of(request)
        for request in hub.requests
        if "/cdn/org/name/model-00001" in request.path and request.client == "w"
    ]
    # Beside the header.
    data = [span for span in asked if span[0]]
    assert data
    assert all(end <= span[0] or span[1] <= first for span in data for first, end in written)


def test_the_next_one_tries_when_one_fails(hub, tmp_path):
    """A failure of the one that downloads is not one of those that wait."""
    hub.add("org/name", sharded(ROWS))
    # Twice, since each tries once more.
    hub.fail("/cdn/*model-00001*", "500", method="GET", times=2, of_bytes=HEADER)
    answers = [answer(process) for process in [start(hub, tmp_path, FETCH, "org/name") for _ in range(3)]]
    assert sorted("error" in found for found in answers) == [False, False, True]
    (failed,) = [found for found in answers if "error" in found]
    assert failed["error"] == "SourceError"
    assert "model-00001" in str(failed["text"])


def test_a_wait_has_an_end(client, tmp_path):
    """The error names what was waited for, and who has it."""
    client.add("org/name", sharded())
    checkpoint = open_checkpoint(pin("org/name", timeout_s=0.2))
    code = (
        "import signal, sys\nfrom raywl.locks import *\n"
        "with acquire_within(get_lock('hf://org/name', sys.argv[1]), 5, 'x'):\n"
        "    print('held', flush=True); signal.pause()"
    )
    holder = start(client, tmp_path, code, str(tmp_path / "hub" / ".locks" / "raywl"))
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LockError, match=r"download of org/name@main: waited 0\.2 s") as caught:
            checkpoint.fetch()
        assert f"process {holder.pid} of " in caught.value.holder
    finally:
        holder.kill()
        holder.communicate()
    checkpoint.fetch()


def test_no_lock_is_needed_for_what_is_there(client, tmp_path):
    client.add("org/name", sharded())
    open_checkpoint("org/name").fetch()
    with acquire_within(get_lock("hf://org/name", tmp_path / "hub" / ".locks" / "raywl"), 5, "test"):
        open_checkpoint(pin("org/name", timeout_s=0.1)).fetch()


def test_environment_set_after_the_client_was_imported(hub, tmp_path):
    """C65: endpoint and offline flag are as they are when something is opened."""
    commit = hub.add("org/name", sharded())
    code = f"""
import json, os, huggingface_hub
os.environ["HF_ENDPOINT"] = {hub.url!r}
from raywl.opening import open_checkpoint
checkpoint = open_checkpoint("org/name")
checkpoint.fetch()
found = [checkpoint.identity]
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
found.append(open_checkpoint("org/name").identity)
print(json.dumps({{"found": found}}))
"""
    process = start(hub, tmp_path, code, HF_ENDPOINT="http://127.0.0.1:9")
    assert answer(process) == {"found": [f"hf:org/name@{commit}"] * 2}


def test_it_is_right_whatever_the_lock_is_worth(hub, tmp_path):
    """C59: `flock` that succeeds for everybody, as on some cluster file systems; one wins."""
    commit = hub.add("org/name", sharded(ROWS))
    slow = hub.fail("/cdn/*model-00001*", "hang", times=1, after_bytes=1 << 18, of_bytes=HEADER)
    code = "import fcntl; fcntl.flock = lambda *_: None\n" + FETCH
    processes = [start(hub, tmp_path, code, "org/name") for _ in range(2)]
    assert slow.reached.wait(120)
    until(lambda: len(list(tmp_path.rglob("snapshots/*/model-00001*"))) == 1)
    slow.released.set()
    for process in processes:
        assert answer(process) == {"identity": f"hf:org/name@{commit}", "tensors": ["a", "b", "c"]}
    checkpoint = pinned_offline(tmp_path, commit)
    assert checkpoint.verify(deep=True).ok
    assert not list(tmp_path.rglob("*.incomplete*"))
    assert hub.downloads()["org/name/model-00001-of-00002.safetensors"] == 2


def test_the_command_line_takes_repositories(hub, tmp_path):
    commit = hub.add("org/name", sharded())
    code = "import sys; from raywl.cli import main; sys.exit(main(['inspect', 'org/name', '--json']))"
    process = start(hub, tmp_path, code)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out)["identity"] == f"hf:org/name@{commit}"


@pytest.mark.parametrize(
    ("ref", "how", "kind", "said"),
    [
        ("org/name", "407", "AuthError", "the proxy refused"),
        ("http://web.example.com/m", "407", "AuthError", "the proxy refused"),
        ("org/name", None, "SourceError", "the hub can't be reached"),
        ("ms://org/name", None, "SourceError", "the server can't be reached"),
        ("http://web.example.com/m", None, "SourceError", "the store can't be reached"),
        ("s3://bucket/m", None, "SourceError", "the store can't be reached"),
    ],
)
def test_a_proxy_is_named(hub, tmp_path, ref, how, kind, said):
    """One that refuses, or that isn't there: it is what has to be looked at. Its password isn't shown."""
    if how:
        hub.fail("*", how)
        proxy = f"127.0.0.1:{hub.port}"
    else:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            proxy = f"127.0.0.1:{unused.getsockname()[1]}"
    ends = dict.fromkeys(("HF_ENDPOINT", "MODELSCOPE_ENDPOINT", "AWS_ENDPOINT_URL"), "http://end.example.com")
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "RAYWL_CACHE": str(tmp_path)}
    via = {"http_proxy": f"http://me:passw0rd@{proxy}", "no_proxy": "", "RAYWL_RETRIES": "0"}
    process = start(hub, tmp_path, FETCH, ref, **ends, **keys, **via)
    found = answer(process)
    assert found["error"] == kind
    assert said in str(found["text"])
    assert f"(through the proxy http://{proxy})" in str(found["text"])
    assert "passw0rd" not in str(found["text"])
