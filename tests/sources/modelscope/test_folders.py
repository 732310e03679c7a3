"""Folders from ModelScope: its real client and a server on 127.0.0.1; many processes and one that counts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from raywl.errors import (
    AuthError,
    LockError,
    MissingFileError,
    NotFoundError,
    OfflineError,
    SourceError,
)
from raywl.locks import acquire_within, get_lock
from raywl.quant import get_quant_config, get_sparse_attention_config
from raywl.sources import modelscope
from raywl.sources.modelscope import maybe_download_from_modelscope
from tests.sources.conftest import sharded
from tests.sources.modelscope.conftest import TOKEN, environment, names_in

SHARD = "model-00001-of-00002.safetensors"


@pytest.mark.parametrize("value", [None, "", "0", "false", "False", "no"])
def test_only_where_it_is_asked_for(client, monkeypatch, value):
    for name in ("VLLM_USE_MODELSCOPE", "RAYWL_USE_MODELSCOPE"):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert maybe_download_from_modelscope("org/name") is None
    assert not client.requests


@pytest.mark.parametrize("switch", ["VLLM_USE_MODELSCOPE", "RAYWL_USE_MODELSCOPE"])
@pytest.mark.parametrize("value", ["1", "true", "True"])
def test_the_folder_of_a_repository(client, tmp_path, monkeypatch, switch, value):
    monkeypatch.delenv("RAYWL_USE_MODELSCOPE")
    monkeypatch.setenv(switch, value)
    files = {"config.json": b"{}", SHARD: b"weights", "sub/x.bin": b"y"}
    client.add("org/name", files)
    folder = maybe_download_from_modelscope("org/name")
    assert Path(folder).is_relative_to(tmp_path / "ms")
    assert {name: (Path(folder) / name).read_bytes() for name in names_in(folder)} == files
    assert dict(client.downloads()) == {f"org/name/{name}": 1 for name in files}


@pytest.mark.parametrize("how", ["MODELSCOPE_ENDPOINT", "MODELSCOPE_DOMAIN"])
@pytest.mark.filterwarnings("ignore:Environment variable MODELSCOPE_DOMAIN:FutureWarning")
def test_where_the_server_is(client, monkeypatch, how):
    monkeypatch.delenv("MODELSCOPE_ENDPOINT")
    monkeypatch.setenv(how, client.url)
    client.add("org/name", {"config.json": b"{}"})
    assert names_in(maybe_download_from_modelscope("org/name")) == {"config.json"}


def test_revision_folder_and_patterns(client, tmp_path):
    """Patterns are globs, and the revision is ModelScope's own default, not the hub's `main`."""
    client.add("org/name", sharded())
    client.add("org/name", {"old.json": b"{}"}, branch="v1")
    mine = tmp_path / "mine"
    folder = maybe_download_from_modelscope(
        "org/name", None, mine, ["*-00002-*", "t*"], ["*.safetensors", "t*"]
    )
    assert Path(folder).is_relative_to(mine)
    assert names_in(folder) == {SHARD, "consolidated.safetensors", "original/model.safetensors"}
    assert names_in(maybe_download_from_modelscope("org/name", "v1", str(mine), allow_patterns="*.json")) == {
        "old.json"
    }
    assert not names_in(tmp_path / "ms")


def test_an_existing_path_is_given_back_as_it_is(client, tmp_path, monkeypatch):
    """Without the client, and whatever it is called."""
    monkeypatch.setitem(sys.modules, "modelscope", None)
    monkeypatch.setitem(sys.modules, "modelscope.hub.snapshot_download", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/name").mkdir(parents=True)
    assert maybe_download_from_modelscope("org/name") == "org/name"
    assert maybe_download_from_modelscope(str(tmp_path)) == str(tmp_path)
    assert not client.requests


def test_the_models_lock_is_held(client, tmp_path, monkeypatch):
    """A wait for it has an end, and the error says who has it."""
    monkeypatch.setattr(modelscope, "_WAIT_S", 0.2)
    code = (
        "import signal, sys\nfrom raywl.locks import *\n"
        "with acquire_within(get_lock('org/name', sys.argv[1]), 5, 'x'):\n"
        "    print('held', flush=True); signal.pause()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LockError, match="download of org/name from ModelScope: waited") as caught:
            maybe_download_from_modelscope("org/name", download_dir=tmp_path)
        assert f"process {holder.pid} of " in caught.value.holder
    finally:
        holder.kill()
        holder.communicate()


def test_without_the_package(client, monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)
    monkeypatch.setitem(sys.modules, "modelscope.hub.snapshot_download", None)
    with pytest.raises(
        ImportError, match=r"org/name: .* needs the modelscope package; .*raywl\[modelscope\]"
    ):
        maybe_download_from_modelscope("org/name")


def test_quantisation_configs_come_from_there_too(client):
    """Of a repository, only the files that may be wanted are fetched."""
    gptq = b'{"bits": 4, "group_size": 128}'
    client.add("org/name", {**sharded(), "quantize_config.json": gptq, "sparse_attention_config.json": b"{}"})
    model = SimpleNamespace(model="org/name", revision=None, quantization="gptq", hf_config=None)
    load = SimpleNamespace(download_dir=None)
    assert get_quant_config(model, load).weight_bits == 4
    assert dict(client.downloads()) == {"org/name/quantize_config.json": 1}
    assert get_sparse_attention_config(model, load) == {}
    client.add("org/name", {"config.json": b"{}"}, branch="v1")
    model.revision = "v1"
    with pytest.raises(ValueError, match="gptq has no config file"):
        get_quant_config(model, load)


class TestOffline:
    """With `HF_HUB_OFFLINE`, as with the hub."""

    @pytest.fixture
    def folder(self, client, monkeypatch):
        client.add("org/name", sharded())
        found = Path(maybe_download_from_modelscope("org/name"))
        client.forget()
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        yield found
        assert not client.requests

    def test_cached(self, folder):
        assert maybe_download_from_modelscope("org/name") == str(folder)

    def test_not_cached(self, folder, tmp_path):
        with pytest.raises(OfflineError, match=r"org/other@master: .*working offline") as caught:
            maybe_download_from_modelscope("org/other")
        assert str(tmp_path / "ms") in str(caught.value)

    def test_a_part_is_an_error_that_names_each_missing_file(self, folder):
        (folder / SHARD).unlink()
        with pytest.raises(MissingFileError, match=SHARD):
            maybe_download_from_modelscope("org/name")
        # Where it wasn't asked for, nothing is missing.
        assert maybe_download_from_modelscope("org/name", allow_patterns=["*.json"]) == str(folder)
        assert maybe_download_from_modelscope("org/name", ignore_patterns="*-00001-*") == str(folder)


class TestFailures:
    """Each is told by class, with repository, revision, file, endpoint and status, and without the token."""

    def raised(self, error, client):
        with pytest.raises(error) as caught:
            maybe_download_from_modelscope("org/name")
        text = str(caught.value)
        assert "org/name@master" in text
        assert TOKEN not in text
        assert client.url in text
        return text

    def test_no_such_repository(self, client):
        assert "status 404" in self.raised(NotFoundError, client)

    def test_gated(self, client, monkeypatch):
        import modelscope_hub

        client.add("org/name", sharded(), gated=True)
        assert "MODELSCOPE_API_TOKEN" in self.raised(AuthError, client)
        client.add("org/name", {"a.json": b"{}"}, gated=True, readers=(TOKEN,))
        monkeypatch.setenv("MODELSCOPE_API_TOKEN", TOKEN)
        modelscope_hub.config.set_default_config(None)
        assert names_in(maybe_download_from_modelscope("org/name")) == {"a.json"}
        assert not any(r.authorized for r in client.requests if r.path.startswith("/cdn/"))

    def test_a_token_that_is_refused(self, client, monkeypatch):
        import modelscope_hub

        client.add("org/name", sharded())
        monkeypatch.setenv("MODELSCOPE_API_TOKEN", TOKEN)
        modelscope_hub.config.set_default_config(None)
        self.raised(AuthError, client)

    def test_a_failing_listing(self, client):
        client.add("org/name", sharded())
        client.fail("/api/v1/models/*/repo/files", "500")
        assert "status 500" in self.raised(SourceError, client)

    def test_a_failing_download(self, client):
        client.add("org/name", sharded())
        client.fail(f"/cdn/*{SHARD}", "503")
        assert f"download of {SHARD}" in self.raised(SourceError, client)
        client.mend()
        assert SHARD in names_in(maybe_download_from_modelscope("org/name"))

    def test_garbled_bytes_are_not_kept(self, client, tmp_path):
        client.add("org/name", {SHARD: b"weights"})
        client.fail(f"/cdn/*{SHARD}", "garble")
        assert SHARD in self.raised(SourceError, client)
        assert not list((tmp_path / "ms").rglob(SHARD))

    def test_no_server_there(self, client, monkeypatch):
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(SourceError, match=r"endpoint http://127\.0\.0\.1:9"):
            maybe_download_from_modelscope("org/name")


FAKE = """
import os
calls, gate, fails = os.environ["CALLS"], os.environ.get("GATE"), int(os.environ.get("FAILS", "0"))
def snapshot_download(**told):
    with open(calls, "a") as file:
        file.write(f"{os.getpid()} {told}\\n")
    with open(calls) as file:
        count = len(file.readlines())
    if gate and count == 1:
        with open(gate) as file:
            file.read()
    if count <= fails:
        raise RuntimeError(f"call {count} failed")
    os.makedirs(told["cache_dir"] + "/model", exist_ok=True)
    return told["cache_dir"] + "/model"
"""
"""A client that counts its calls; the first one waits at the gate, and the first so many fail."""

ASK = """
import json, logging, sys
logging.basicConfig(stream=sys.stderr)
from raywl.sources.modelscope import maybe_download_from_modelscope
print("asking", flush=True)
try:
    print(json.dumps({"path": maybe_download_from_modelscope("org/name", download_dir=sys.argv[1])}))
except Exception as error:
    print(json.dumps({"error": str(error), "notes": getattr(error, "__notes__", [])}))
"""


@pytest.fixture
def ranks(tmp_path):
    """Starts processes with the counting client; tells how often it was called."""
    package = tmp_path / "fake/modelscope/hub"
    package.mkdir(parents=True)
    for name in ("fake/modelscope/__init__.py", "fake/modelscope/hub/__init__.py"):
        (tmp_path / name).touch()
    (package / "snapshot_download.py").write_text(FAKE)
    (tmp_path / "calls").touch()
    os.mkfifo(tmp_path / "gate")
    started = []

    def start(new_session=False, **environment):
        inherited = {"PYTHONPATH": str(tmp_path / "fake"), "RAYWL_USE_MODELSCOPE": "1", "HF_HUB_OFFLINE": "0"}
        process = subprocess.Popen(
            [sys.executable, "-c", ASK, str(tmp_path / "dir")],
            env={**os.environ, **inherited, "CALLS": str(tmp_path / "calls"), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=new_session,
        )
        started.append(process)
        return process

    start.calls = lambda: (tmp_path / "calls").read_text().splitlines()
    start.gate = str(tmp_path / "gate")
    start.note = lambda: next((tmp_path / "dir").glob("*.modelscope.json"))
    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def outcome(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1]) | {"log": err}


def wait_until_asking(processes):
    for process in processes:
        assert process.stdout.readline() == "asking\n"


def test_four_ranks_make_one_call(ranks, tmp_path):
    """C67: one asks, the others get its path."""
    processes = [ranks(GATE=ranks.gate) for _ in range(4)]
    wait_until_asking(processes)
    with open(ranks.gate, "w"):
        pass
    assert {outcome(process)["path"] for process in processes} == {str(tmp_path / "dir/model")}
    assert len(ranks.calls()) == 1


def test_a_rank_that_comes_late_takes_the_path(ranks):
    """For a while; then what a branch is at is asked again."""
    first = outcome(ranks())["path"]
    assert outcome(ranks())["path"] == first
    assert len(ranks.calls()) == 1
    note = json.loads(ranks.note().read_text())
    ranks.note().write_text(json.dumps({**note, "at_s": note["at_s"] - 3600}))
    assert outcome(ranks())["path"] == first
    assert len(ranks.calls()) == 2


def test_another_launch_asks_again(ranks):
    """What a branch is at may have changed between two launches, however close."""
    outcome(ranks())
    note = json.loads(ranks.note().read_text())
    assert note["launch"][0] == f"group {os.getpgid(0)} of job "
    ranks.note().write_text(json.dumps({**note, "launch": ["group 1 of job ", "parent 2 of job "]}))
    outcome(ranks())
    assert len(ranks.calls()) == 2
    outcome(ranks(RAY_JOB_ID="02000000"))
    assert len(ranks.calls()) == 3


def test_ranks_with_a_process_group_each_are_of_one_launch(ranks):
    """As launchers start them that end all processes of a rank together."""
    for _ in range(2):
        outcome(ranks(new_session=True))
    assert len(ranks.calls()) == 1


def test_threads_are_ranks_too(client):
    client.add("org/name", {"config.json": b"{}"})
    ready = threading.Barrier(3)

    def ask(_):
        ready.wait(30)
        return maybe_download_from_modelscope("org/name")

    with ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(ask, range(3)))) == 1
    assert client.listings() == 1


def test_a_note_is_not_taken_for_more_than_it_says(ranks, tmp_path):
    """Of another request, of another version, damaged, or of a folder that is gone: ask again."""
    outcome(ranks())
    os.rmdir(tmp_path / "dir/model")
    outcome(ranks())
    outcome(ranks(MODELSCOPE_ENDPOINT="http://127.0.0.1:9"))
    ranks.note().write_text("{")
    outcome(ranks())
    ranks.note().write_text('{"version": 2}')
    outcome(ranks())
    assert len(ranks.calls()) == 5


def test_the_next_one_tries_when_one_fails(ranks, tmp_path):
    """C67: it is told why, and the one that failed raises its own error."""
    processes = [ranks(GATE=ranks.gate, FAILS="1") for _ in range(4)]
    wait_until_asking(processes)
    with open(ranks.gate, "w"):
        pass
    found = [outcome(process) for process in processes]
    assert [one["error"] for one in found if "error" in one] == ["call 1 failed"]
    assert [one["path"] for one in found if "path" in one] == [str(tmp_path / "dir/model")] * 3
    assert len(ranks.calls()) == 2
    told = [one for one in found if "and this one tries: RuntimeError: call 1 failed" in one["log"]]
    assert len(told) <= 1


def test_all_fail(ranks):
    """Each raises its own error, with the one before it."""
    processes = [ranks(GATE=ranks.gate, FAILS="9") for _ in range(3)]
    wait_until_asking(processes)
    with open(ranks.gate, "w"):
        pass
    found = [outcome(process) for process in processes]
    assert sorted(one["error"] for one in found) == [f"call {n} failed" for n in (1, 2, 3)]
    notes = {one["error"]: one["notes"] for one in found}
    assert notes["call 1 failed"] == []
    assert "call 2 failed" in notes["call 3 failed"][0]


def test_another_one_goes_on_when_one_is_killed(ranks, tmp_path):
    killed = ranks(GATE=ranks.gate)
    wait_until_asking([killed])
    # The writer's end of the gate opens once the client is inside.
    with open(ranks.gate, "w"):
        waiting = ranks(GATE=ranks.gate)
        wait_until_asking([waiting])
        killed.send_signal(signal.SIGKILL)
        assert killed.wait(30) == -signal.SIGKILL
        assert outcome(waiting)["path"] == str(tmp_path / "dir/model")
    assert len(ranks.calls()) == 2


def test_the_same_process_asks_again(client):
    """A later call of one process is not one of several ranks."""
    client.add("org/name", {"config.json": b"{}"})
    maybe_download_from_modelscope("org/name")
    client.add("org/name", {"config.json": b"{ }"})
    folder = maybe_download_from_modelscope("org/name")
    assert (Path(folder) / "config.json").read_bytes() == b"{ }"
    assert client.listings() == 2


def test_a_note_that_can_not_be_written_is_no_failure(client, tmp_path, caplog):
    client.add("org/name", {"config.json": b"{}"})
    mine = tmp_path / "mine"
    note = Path(get_lock("org/name", mine).lock_file.removesuffix(".lock") + ".modelscope.json")
    note.mkdir(parents=True)
    assert names_in(maybe_download_from_modelscope("org/name", download_dir=mine)) == {"config.json"}
    assert "can't be written" in caplog.text
    with acquire_within(get_lock("org/name", mine), 5, "test"):
        pass


REAL = """
import json
from raywl.sources.modelscope import maybe_download_from_modelscope
print(json.dumps({"path": maybe_download_from_modelscope("org/name")}))
"""


@pytest.mark.slow
def test_four_processes_with_the_real_client_fetch_each_file_once(server, tmp_path):
    server.add("org/name", sharded(rows=50_000))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", REAL],
            env={**os.environ, **environment(server, tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    assert len({outcome(process)["path"] for process in processes}) == 1
    assert server.listings() == 1
    assert set(server.downloads().values()) == {1}
    assert len(server.downloads()) == len(sharded())
