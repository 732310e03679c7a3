"""Disks that are full, fill up in the middle, or are read-only: small file systems of the tests' own."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.sources.conftest import shard, start_plain
from tests.web_server import WebServer

ROWS = 60_000
"""Of a tensor of 1.8 MiB."""

MOUNTED = """
import os, subprocess, sys
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={sys.argv[1]}", "tmpfs", sys.argv[2]], check=True)
os.environ["RAYWL_CACHE"] = sys.argv[2] + "/cache"
"""


def in_a_small_disk(code, size, folder, *args, **environment):
    """What a script prints, run where `folder` is a file system of that size, as JSON."""
    folder.mkdir()
    unshared = ["unshare", "--user", "--map-root-user", "--mount"]
    try:
        tried = subprocess.run(
            [*unshared, "mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, timeout=30, check=False
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if tried.returncode:
        pytest.skip("this machine lets nobody mount anything")
    process = start_plain(
        f"import os, sys; os.execvp('unshare', {unshared!r} + [sys.executable, '-c', *sys.argv[1:]])",
        MOUNTED + code, size, str(folder), *args, **environment,
    )  # fmt: skip
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.fixture
def web(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with WebServer() as server:
        server.files = {"m/model.safetensors": shard(["a"], ROWS), "m/config.json": b"{}"}
        yield server


REFUSED = """
import json
from raywl.errors import CapacityError
from raywl.opening import open_checkpoint
try:
    open_checkpoint(sys.argv[3]).fetch()
except CapacityError as error:
    print(json.dumps({"needed": error.needed, "available": error.available, "text": str(error)}))
"""


def test_what_will_not_fit_is_known_before(web, tmp_path):
    """With the numbers; nothing of it is fetched."""
    found = in_a_small_disk(REFUSED, "1m", tmp_path / "disk", f"{web.url}/m")
    assert found["needed"] == sum(len(data) for data in web.files.values())
    assert found["available"] <= 1 << 20
    assert "disk space" in found["text"]
    assert "give another cache_dir" in found["text"]
    # The look at it alone.
    assert web.num_bytes("/m/model.safetensors") == 256 << 10


FILLED = """
import json, pathlib
from raywl.errors import CapacityError
from raywl.opening import open_checkpoint
checkpoint = open_checkpoint(sys.argv[3])
filler = pathlib.Path(sys.argv[2], "filler")
def fill(done, total, phase):
    if done > 1_000_000 and not filler.exists():
        with open(filler, "wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass
try:
    checkpoint.fetch(progress=fill)
except CapacityError as error:
    text = str(error)
names = [path.name for path in pathlib.Path(checkpoint.path("")).iterdir()]
filler.unlink()
checkpoint.fetch()
print(json.dumps({"text": text, "names": names, "ok": checkpoint.verify(deep=True).ok}))
"""


def test_a_disk_that_fills_up(web, tmp_path):
    """What had come stays, and nothing of it comes again; nothing half-written has a name."""
    found = in_a_small_disk(FILLED, "4m", tmp_path / "disk", f"{web.url}/m")
    assert "No space left on device" in found["text"]
    assert "what was fetched is kept" in found["text"]
    assert "model.safetensors" not in found["names"]
    assert found["ok"]
    size = len(web.files["m/model.safetensors"])
    # What was in flight when it filled up was sent twice.
    assert size <= web.num_bytes("/m/model.safetensors") < size + (4 << 20)
    spans = [request.range for request in web.requests if request.path == "/m/model.safetensors"]
    starts = [int(span.removeprefix("bytes=").partition("-")[0]) for span in spans]
    assert max(starts) >= 1_000_000


READ_ONLY = """
import json
from raywl.errors import RaywlError
from raywl.opening import open_checkpoint
open_checkpoint(sys.argv[3]).fetch()
subprocess.run(["mount", "-o", "remount,ro", sys.argv[2]], check=True)
found = {}
for offline in (False, True):
    checkpoint = open_checkpoint(sys.argv[3], offline=offline)
    found[str(offline)] = checkpoint.fetch(), [name for name, _ in checkpoint.iter_weights()]
try:
    open_checkpoint(sys.argv[3] + "/model.safetensors").fetch()
except RaywlError as error:
    found["error"] = type(error).__name__, str(error)
print(json.dumps(found))
"""


def test_a_full_cache_may_be_read_only(web, tmp_path):
    """C62; and what is absent is refused in words."""
    found = in_a_small_disk(READ_ONLY, "4m", tmp_path / "disk", f"{web.url}/m")
    assert found["False"] == found["True"] == [0, ["a"]]
    kind, text = found["error"]
    assert kind in ("LockError", "SourceError")
    assert "Read-only file system" in text
    assert "cache_dir" in text
