"""Weights of a repository by patterns, through the hub's real client, from a server on 127.0.0.1."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raywl.errors import (
    AuthError,
    CheckpointError,
    CorruptFileError,
    LockError,
    MissingFileError,
    NotFoundError,
    OfflineError,
    SourceError,
)
from raywl.locks import acquire_within, get_lock
from raywl.sources import HubPin, snapshots
from raywl.weight_utils import (
    download_safetensors_index_file_from_hf,
    download_weights_from_hf,
    enable_xet_high_performance,
)
from tests.sources.conftest import answer, shard, sharded, start

INDEX = "model.safetensors.index.json"
SHARDS = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
HF = ["*.safetensors", "*.bin", "*.pt"]
LEFTOVERS = [
    "training_args.bin",
    "optimizer.bin",
    "optimizer.pt",
    "scheduler.pt",
    "scaler.pt",
    "sub/optimizer.bin",
]


def index_of(weight_map):
    return json.dumps({"weight_map": weight_map}).encode()


def fetched(hub):
    """What was downloaded, each once."""
    downloads = hub.downloads()
    assert set(downloads.values()) <= {1}, downloads
    return {name.removeprefix("org/name/") for name in downloads}


def named(names):
    """Files by those names; all different, since the cache keeps equal ones once."""
    return {name: name.encode() for name in names}


def test_exactly_the_files_of_the_index(client, tmp_path):
    """C05, C03: not `original/`, not `metal/`, not `consolidated`, no other format."""
    commit = client.add("org/name", sharded())
    folder = download_weights_from_hf("org/name", None, HF)
    assert folder == str(tmp_path / "hub/models--org--name/snapshots" / commit)
    assert fetched(client) == {INDEX, *SHARDS}
    assert set(os.listdir(folder)) == {INDEX, *SHARDS}


@pytest.mark.parametrize("patterns", [["*.safetensors", "*.bin"], ["fp8/*.safetensors"]], ids=str)
def test_the_index_of_the_subfolder(client, patterns):
    """MUST DIFFER: the subfolder's own index counts, and the snapshot's root comes back, as ever."""
    fp8 = {f"fp8/{name}": data for name, data in sharded().items()}
    commit = client.add("org/name", {**sharded(), **fp8, "fp8/old/model.safetensors": b"no"})
    folder = download_weights_from_hf("org/name", None, patterns, subfolder="fp8/")
    assert Path(folder).name == commit
    assert fetched(client) == {f"fp8/{name}" for name in (INDEX, *SHARDS)}


def test_an_index_elsewhere_says_nothing_of_a_subfolder(client):
    """MUST DIFFER: the root's index names files that the subfolder doesn't have."""
    client.add("org/name", {**sharded(), "fp8/model.safetensors": shard(["z"])})
    folder = download_weights_from_hf("org/name", None, HF, subfolder="fp8")
    assert fetched(client) == {"fp8/model.safetensors"}
    assert os.path.isfile(os.path.join(folder, "fp8", "model.safetensors"))


def test_an_index_with_an_empty_map(client):
    client.add(
        "org/name", {INDEX: index_of({}), **named(["a.safetensors", "b.safetensors", "model.bin", "o/a.bin"])}
    )
    download_weights_from_hf("org/name", None, HF)
    assert fetched(client) == {INDEX, "a.safetensors", "b.safetensors"}


def test_an_index_with_files_in_a_folder(client):
    client.add(
        "org/name",
        {
            INDEX: index_of({"a": "./parts/1.safetensors"}),
            **named(["parts/1.safetensors", "parts/2.safetensors"]),
        },
    )
    download_weights_from_hf("org/name", None, ["*.safetensors"])
    assert fetched(client) == {INDEX, "parts/1.safetensors"}


@pytest.mark.parametrize(
    ("names", "patterns", "expected"),
    [
        (["model.safetensors", "pytorch_model.bin", *LEFTOVERS], HF, {"model.safetensors"}),
        (["pytorch_model.bin", *LEFTOVERS], HF, {"pytorch_model.bin"}),
        (["model.pt", *LEFTOVERS], HF, {"model.pt"}),
        (["model.safetensors", "model.bin"], ["*.bin", "*.safetensors"], {"model.bin"}),
        (["a.bin", "b.bin", "c.pt"], ["x*", "*.bin", "*.pt"], {"a.bin", "b.bin"}),
        (["model.safetensors", "original/model.safetensors"], HF, {"model.safetensors"}),
        (["original/model.safetensors", "m.pt"], HF, {"m.pt"}),
        (["original/model.safetensors", "m.pt"], ["original/*.safetensors"], {"original/model.safetensors"}),
        (["a/b/1.bin", "a/2.bin"], ["a/*.bin"], {"a/2.bin"}),
        (["a/b/1.bin", "a/2.bin"], ["a/**"], {"a/b/1.bin", "a/2.bin"}),
        (["model.safetensors", "consolidated.safetensors"], HF, {"model.safetensors"}),
        (["consolidated.safetensors"], HF, {"consolidated.safetensors"}),
        (
            ["model.safetensors", "consolidated.00.safetensors"],
            ["consolidated*.safetensors"],
            {"consolidated.00.safetensors"},
        ),
        (["optimizer.bin", "model.bin"], ["optimizer.bin"], {"optimizer.bin"}),
        (["M.SAFETENSORS", "m.safetensors"], "*.safetensors", {"m.safetensors"}),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_the_first_pattern_that_matches_is_used_alone(client, names, patterns, expected):
    """C03, C05, C07: in order, of the folder itself, without copies and what trainers leave behind."""
    client.add("org/name", named(names))
    download_weights_from_hf("org/name", None, patterns)
    assert fetched(client) == expected


def test_what_is_left_out_is_said(client, caplog):
    """C07."""
    client.add("org/name", named(["pytorch_model.bin", *LEFTOVERS]))
    with caplog.at_level("INFO", "raywl"):
        download_weights_from_hf("org/name", None, HF)
    assert "*.bin doesn't mean optimizer.bin, training_args.bin" in caplog.text
    assert "1 files that match '*.bin'" in caplog.text


@given(
    names=st.lists(
        st.sampled_from(
            ["a.safetensors", "consolidated.safetensors", "x.bin", "o/x.bin", "optimizer.bin", "m.pt"]
        ),
        unique=True,
    ),
    patterns=st.lists(st.sampled_from(["*.safetensors", "*.bin", "*.pt", "c*"]), min_size=1),
)
def test_what_is_chosen_is_there_and_of_one_pattern(names, patterns):
    """Whatever a repository holds: only files that it has, of the folder itself, and of no later pattern."""
    pin, choice = HubPin("org/name", "0" * 40), snapshots._Choice(tuple(patterns), ())
    try:
        chosen = snapshots._choose(pin, names, choice)
    except CheckpointError:
        assert not any(choice.matching(pin, names, pattern) for pattern in patterns)
        return
    assert chosen == sorted(chosen)
    assert set(chosen) <= {name for name in names if "/" not in name and name != "optimizer.bin"}
    first = next(p for p in patterns if choice.matching(pin, names, p))
    assert chosen == choice.matching(pin, names, first)


def test_ignored_files(client):
    client.add("org/name", named(["a.bin", "b.bin", "fp8/c.bin"]))
    download_weights_from_hf("org/name", None, ["*.bin"], ignore_patterns="a*")
    assert fetched(client) == {"b.bin"}
    with pytest.raises(CheckpointError, match=r"no file matches \['\*\.bin'\]"):
        download_weights_from_hf("org/name", None, ["*.bin"], None, "fp8", ["fp8/"])


def test_ignoring_what_the_index_names_is_said(client):
    client.add("org/name", sharded())
    with pytest.warns(UserWarning, match=r"1 of 2 files that .* names are ignored: model-00001"):
        download_weights_from_hf("org/name", None, HF, ignore_patterns=["*-00001-*"])
    assert fetched(client) == {INDEX, "model-00002-of-00002.safetensors"}


def test_nothing_matches(client):
    client.add("org/name", named(["config.json", "model.bin"]))
    with pytest.raises(CheckpointError, match=r"no file matches \['\*\.safetensors'\]; .*: model\.bin"):
        download_weights_from_hf("org/name", None, ["*.safetensors"])


@pytest.mark.parametrize(
    ("index", "error", "said"),
    [
        (index_of({"a": "absent.safetensors"}), MissingFileError, "absent.safetensors"),
        (index_of({"a": "../m.safetensors"}), CheckpointError, r"'\.\./m\.safetensors' leads outside"),
        (index_of({"a": "/m.safetensors"}), CheckpointError, "leads outside"),
        (index_of({"a": 3}), CorruptFileError, "damaged"),
        (b"{", CorruptFileError, "damaged"),
        (b"[]", CorruptFileError, "damaged"),
    ],
)
def test_an_index_that_can_not_be_followed(client, index, error, said):
    """C01: an error before any weight is fetched."""
    client.add("org/name", {INDEX: index, "m.safetensors": b"x"})
    with pytest.raises(error, match=said):
        download_weights_from_hf("org/name", None, HF)
    assert fetched(client) == {INDEX}


def test_the_second_time_nothing_is_fetched(client):
    client.add("org/name", sharded())
    first = download_weights_from_hf("org/name", None, HF)
    client.forget()
    assert download_weights_from_hf("org/name", None, HF) == first
    assert [request.path for request in client.requests] == ["/api/models/org/name/revision/main"]


def test_revisions_and_a_cache_of_ones_own(client, tmp_path):
    client.add("org/name", sharded())
    commit = client.add("org/name", {"old.bin": b"x"}, branch="v1")
    expected = str(tmp_path / "mine/models--org--name/snapshots" / commit)
    assert download_weights_from_hf("org/name", tmp_path / "mine", HF, "v1") == expected
    assert download_weights_from_hf("org/name@v1", str(tmp_path / "mine"), HF) == expected
    assert not (tmp_path / "hub").exists()


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("/models/x/y", NotFoundError),
        ("./x", NotFoundError),
        ("~/no/such", NotFoundError),
        ("a/b/c", NotFoundError),
        (Path("org/name"), NotFoundError),
        ("org/na me", ValueError),
    ],
    ids=str,
)
def test_what_is_no_repository(client, name, error):
    """C65: a missing local path is said to be one, and the hub is not asked."""
    with pytest.raises(error) as caught:
        download_weights_from_hf(name, None, HF)
    assert ("path not found" in str(caught.value)) == (error is NotFoundError)
    assert not client.requests


def test_a_local_folder_is_given_back(client, tmp_path, monkeypatch):
    """C65, C100: whatever it is called; a repository of that name is not asked for."""
    (tmp_path / "org/name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    client.add("org/name", sharded())
    assert download_weights_from_hf("org/name", None, HF) == "org/name"
    assert download_weights_from_hf(tmp_path / "org", None, HF) == str(tmp_path / "org")
    download_safetensors_index_file_from_hf("org/name", INDEX, None)
    assert not client.requests
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file; expected a folder"):
        download_weights_from_hf(tmp_path / "file", None, HF)


def test_no_patterns(client):
    with pytest.raises(ValueError, match="allow_patterns is empty"):
        download_weights_from_hf("org/name", None, [])


def test_a_repository_without_an_organisation(client):
    client.add("gpt2", {"model.safetensors": b"x"})
    assert os.listdir(download_weights_from_hf("gpt2", None, HF)) == ["model.safetensors"]


def test_answers_are_errors_at_once(client):
    client.add("org/name", sharded())
    client.add("org/gated", sharded(), private=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, subfolder, error in [
            ("org/none", None, NotFoundError),
            ("org/gated", None, NotFoundError),
            ("org/name", "no", NotFoundError),
        ]:
            with pytest.raises(error):
                download_weights_from_hf(name, None, HF, subfolder=subfolder)


class TestListingFails:
    """A warning, then the hub is asked again for each pattern, then the cache must do."""

    def test_once(self, client):
        client.add("org/name", sharded())
        client.fail("/api/models/*", "500", times=1)
        with pytest.warns(UserWarning, match=r"files of org/name can't be listed: .*status 500"):
            download_weights_from_hf("org/name", None, HF)
        assert fetched(client) == {INDEX, *SHARDS}

    @pytest.mark.parametrize("how", ["500", "unreachable"])
    def test_for_good_with_all_in_the_cache(self, client, monkeypatch, how):
        client.add("org/name", sharded())
        folder = download_weights_from_hf("org/name", None, HF)
        client.forget()
        if how == "500":
            client.fail("/api/models/*", "500")
        else:
            monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        with pytest.warns(UserWarning, match="can't be listed"):
            assert download_weights_from_hf("org/name", None, HF) == folder
        assert len(client.requests) == (1 + len(HF) if how == "500" else 0)

    def test_for_good_with_a_part_in_the_cache(self, client, tmp_path):
        """The client itself would give the folder back as if it were whole."""
        client.add("org/name", sharded())
        folder = Path(download_weights_from_hf("org/name", None, HF))
        (folder / "model-00002-of-00002.safetensors").unlink()
        client.fail("/api/models/*", "503")
        with (
            pytest.warns(UserWarning, match="can't be listed"),
            pytest.raises(MissingFileError, match="model-00002-of-00002"),
        ):
            download_weights_from_hf("org/name", None, HF)

    def test_for_good_with_nothing_in_the_cache(self, client):
        client.add("org/name", sharded())
        client.fail("/api/models/*", "500")
        with (
            pytest.warns(UserWarning, match="can't be listed"),
            pytest.raises(SourceError, match="status 500") as caught,
        ):
            download_weights_from_hf("org/name", None, HF)
        assert not isinstance(caught.value, OfflineError)


@pytest.fixture
def cached(client, monkeypatch):
    """A repository's weights in the cache, and the client offline from then on."""
    commit = client.add("org/name", {**sharded(), "fp8/model.safetensors": b"x"})
    folder = Path(download_weights_from_hf("org/name", None, HF))
    client.forget()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert folder.name == commit
    yield folder
    assert not client.requests


class TestOffline:
    """Only the cache, and never a part of a checkpoint for the whole."""

    def test_whole(self, cached):
        assert download_weights_from_hf("org/name", None, HF) == str(cached)
        assert download_weights_from_hf(f"org/name@{cached.name}", None, HF) == str(cached)

    @pytest.mark.parametrize("dangling", [False, True])
    def test_a_part_is_an_error_that_names_each_missing_file(self, cached, dangling):
        """C63, MUST DIFFER: the client gives the folder back, whatever is in it."""
        for name in SHARDS:
            if dangling:
                os.unlink(os.path.realpath(cached / name))
            else:
                (cached / name).unlink()
        with pytest.raises(MissingFileError, match=r"lacks 2 files") as caught:
            download_weights_from_hf("org/name", None, HF)
        assert set(caught.value.files) == SHARDS
        assert all(name in str(caught.value) for name in SHARDS)

    def test_a_part_is_not_passed_over_for_another_format(self, cached):
        (cached / "model-00001-of-00002.safetensors").unlink()
        (cached / "pytorch_model.bin").write_bytes(b"x")
        with pytest.raises(MissingFileError, match="model-00001"):
            download_weights_from_hf("org/name", None, HF)

    @pytest.mark.parametrize("suffix", ["safetensors", "bin"])
    def test_numbers_tell_what_is_missing_without_an_index(self, cached, suffix):
        for path in cached.iterdir():
            path.unlink()
        (cached / f"model-00002-of-00003.{suffix}").write_bytes(b"x")
        with pytest.raises(MissingFileError) as caught:
            download_weights_from_hf("org/name", None, HF)
        assert caught.value.files == (f"model-00001-of-00003.{suffix}", f"model-00003-of-00003.{suffix}")

    def test_the_clients_own_record_counts(self, client, tmp_path, monkeypatch):
        """C63: what another tool began to download is known from the listing that it left."""
        huggingface_hub = pytest.importorskip("huggingface_hub", minversion="2.0")
        client.add("org/name", named(["a.safetensors", "b.safetensors"]))
        folder = Path(huggingface_hub.snapshot_download("org/name", endpoint=client.url))
        (folder / "b.safetensors").unlink()
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(MissingFileError, match=r"b\.safetensors"):
            download_weights_from_hf("org/name", None, HF)

    def test_nothing_of_the_subfolder(self, cached):
        with pytest.raises(OfflineError, match=r"no file of folder 'fp8' of .* matches .* it has: no files"):
            download_weights_from_hf("org/name", None, HF, subfolder="fp8")

    def test_nothing_that_matches(self, cached):
        with pytest.raises(OfflineError, match=r"matches \['\*\.gguf'\]; it has: model-00001"):
            download_weights_from_hf("org/name", None, ["*.gguf"])

    def test_not_in_the_cache(self, cached, tmp_path):
        """C65: the error names repository, revision and cache."""
        with pytest.raises(OfflineError) as caught:
            download_weights_from_hf("org/other", None, HF, "v2")
        for part in ("org/other", "v2", str(tmp_path / "hub")):
            assert part in str(caught.value)

    def test_missing_path(self, cached):
        with pytest.raises(NotFoundError, match="path not found"):
            download_weights_from_hf("/models/x/y", None, HF)

    def test_an_index_that_is_not_there_is_no_error(self, cached):
        download_safetensors_index_file_from_hf("org/name", "consolidated.safetensors.index.json", None)
        download_safetensors_index_file_from_hf("org/other", INDEX, None)


DOWNLOAD = """
import json, os
from raywl.sources.snapshots import download_weights_from_hf
try:
    folder = download_weights_from_hf("org/name", None, ["*.safetensors", "*.bin"])
    print(json.dumps({"folder": folder, "names": sorted(os.listdir(folder))}))
except Exception as error:
    print(json.dumps({"error": type(error).__name__, "text": str(error)}))
"""


def test_three_processes_fetch_each_file_once(hub, tmp_path):
    """One downloads while the others wait and take what it brought."""
    commit = hub.add("org/name", sharded(rows=50_000))
    slow = hub.fail("/cdn/*model-00001*", "hang", times=1, after_bytes=1 << 16)
    processes = [start(hub, tmp_path, DOWNLOAD) for _ in range(3)]
    hub.wait_for(3, "/api/models/org/name/*", 120.0)
    assert slow.reached.wait(120)
    assert all(process.poll() is None for process in processes)
    slow.released.set()
    found = [answer(process, 120.0) for process in processes]
    assert fetched(hub) == {INDEX, *SHARDS}
    folder = str(tmp_path / "hub/models--org--name/snapshots" / commit)
    assert found == [{"folder": folder, "names": sorted({INDEX, *SHARDS})}] * 3


@pytest.mark.parametrize("what", ["weights", "index"])
def test_the_models_lock_is_held(client, tmp_path, monkeypatch, what):
    """Whoever holds it is waited for, but not for ever; and it is not needed for what is there."""
    client.add("org/name", sharded())
    monkeypatch.setattr(snapshots, "_WAIT_S", 0.2)
    code = (
        "import signal, sys\nfrom raywl.locks import *\n"
        "with acquire_within(get_lock('org/name', sys.argv[1]), 5, 'x'):\n"
        "    print('held', flush=True); signal.pause()"
    )

    def download():
        if what == "weights":
            download_weights_from_hf("org/name", tmp_path / "mine", HF)
        else:
            download_safetensors_index_file_from_hf("org/name", INDEX, tmp_path / "mine")

    holder = start(client, tmp_path, code, str(tmp_path / "mine"))
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LockError, match=r"download of .*org/name.*: waited 0\.2 s") as caught:
            download()
        assert f"process {holder.pid} of " in caught.value.holder
        assert not client.downloads()
    finally:
        holder.kill()
        holder.communicate()
    download()
    with acquire_within(get_lock("org/name", tmp_path / "mine"), 5, "test"):
        download()


def test_a_failed_download_leaves_nothing_under_its_name(client):
    client.add("org/name", sharded())
    client.fail("/cdn/*model-00002*", "500", method="GET")
    with pytest.raises(SourceError, match="model-00002"):
        download_weights_from_hf("org/name", None, HF)
    client.mend()
    folder = download_weights_from_hf("org/name", None, HF)
    assert set(os.listdir(folder)) == {INDEX, *SHARDS}


class TestIndex:
    """`download_safetensors_index_file_from_hf`."""

    @pytest.mark.parametrize("subfolder", [None, "fp8"])
    def test_fetches_the_index_alone(self, client, tmp_path, subfolder):
        files = {f"fp8/{name}": data for name, data in sharded().items()}
        commit = client.add("org/name", {**sharded(), **files})
        for _ in range(2):
            found = download_safetensors_index_file_from_hf("org/name", INDEX, None, subfolder)
            assert found is None
        name = f"{subfolder}/{INDEX}" if subfolder else INDEX
        assert fetched(client) == {name}
        assert (tmp_path / "hub/models--org--name/snapshots" / commit / name).is_file()

    def test_a_repository_without_one_is_no_error(self, client):
        client.add("org/name", {"model.safetensors": b"x"})
        download_safetensors_index_file_from_hf("org/name", INDEX, None, revision="main")
        assert not fetched(client)

    def test_no_repository_is_one(self, client):
        with pytest.raises(NotFoundError):
            download_safetensors_index_file_from_hf("org/name", INDEX, None)

    def test_a_gated_one_is_one(self, client):
        client.add("org/name", sharded(), gated=True)
        with pytest.raises(AuthError):
            download_safetensors_index_file_from_hf("org/name", INDEX, None)

    def test_a_failing_hub_is_one(self, client):
        client.add("org/name", sharded())
        client.fail("/api/*", "500")
        with pytest.warns(UserWarning, match="can't be listed"), pytest.raises(SourceError):
            download_safetensors_index_file_from_hf("org/name", INDEX, None)


@pytest.fixture
def xet(monkeypatch):
    """The client's constants, with nothing set; and everything as it was, afterwards."""
    from huggingface_hub import constants

    name = "HF_XET_HIGH_PERFORMANCE"
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    monkeypatch.setattr(snapshots, "_xet_was_set_here", False)
    monkeypatch.setattr(constants, name, False)
    return constants


def test_high_performance_is_switched_on(xet):
    for _ in range(2):
        enable_xet_high_performance()
        assert xet.HF_XET_HIGH_PERFORMANCE is True
        assert os.environ["HF_XET_HIGH_PERFORMANCE"] == "1"


@pytest.mark.parametrize("value", ["0", "1", ""])
def test_what_the_user_set_stays(xet, monkeypatch, value):
    monkeypatch.setenv("HF_XET_HIGH_PERFORMANCE", value)
    enable_xet_high_performance()
    assert os.environ["HF_XET_HIGH_PERFORMANCE"] == value
    assert xet.HF_XET_HIGH_PERFORMANCE is False
