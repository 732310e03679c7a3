"""What a ref means, and which options go with it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from raywl.checkpoint.index import choose_files, parse_index
from raywl.errors import NotFoundError, SourceError
from raywl.opening import open_checkpoint
from raywl.sources import HubPin, pin, resolve
from raywl.sources.hub import parse_hub_ref
from raywl.sources.selection import companions, folder_names, format_of, indexed_files, weight_files
from tests.sources.conftest import shard, sharded

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("ref", "revision", "found"),
    [
        ("org/name", None, ("org/name", "main")),
        ("org/name@v1", None, ("org/name", "v1")),
        ("hf://org/name", None, ("org/name", "main")),
        ("hf://org/name@refs/pr/3", None, ("org/name", "refs/pr/3")),
        (f"hf://org/name@{COMMIT}", COMMIT, ("org/name", COMMIT)),
        ("org/name", "v2", ("org/name", "v2")),
        ("hf://gpt2", None, ("gpt2", "main")),
    ],
)
def test_repositories(ref, revision, found):
    assert parse_hub_ref(ref, revision) == found


@pytest.mark.parametrize(
    ("ref", "revision", "said"),
    [
        ("org/name@v1", "v2", "'v1'"),
        ("org/name@", None, "no revision after"),
        ("hf://org/name/sub", None, "subfolder"),
        ("hf://", None, "no repository"),
        ("hf://org/na me", None, "no repository"),
    ],
)
def test_what_names_no_repository_is_misuse(client, ref, revision, said):
    with pytest.raises(ValueError, match=said):
        open_checkpoint(ref, revision=revision)
    assert client.count() == 0


@pytest.mark.parametrize(
    "ref",
    ["/models/x/y", "./org/name", "../org/name", "~/org/name", "org/", "org", "a/b/c", "org/x.safetensors"],
)
@pytest.mark.parametrize("offline", [True, False])
def test_an_absent_path_is_a_path(client, ref, offline):
    """C65: whether the hub may be asked or not, it isn't, and the error is about a path."""
    with pytest.raises(NotFoundError, match="path not found") as caught:
        open_checkpoint(ref, offline=offline)
    assert caught.value.local
    assert client.count() == 0


def test_an_existing_path_always_wins(client, tmp_path, monkeypatch):
    """Without asking anybody."""
    client.add("org/name", sharded())
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "model.safetensors").write_bytes(shard(["local"]))
    monkeypatch.chdir(tmp_path)
    for ref in ("org/name", "org/name/", "./org/name", str(tmp_path / "org" / "name")):
        checkpoint = open_checkpoint(ref, token="unused", cache_dir=tmp_path / "other", offline=False)
        assert list(checkpoint.tensors) == ["local"]
        assert pin(ref) is None
    assert client.count() == 0
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("ref", "said"),
    [
        ("nosuch://bucket/key", "no protocol of fsspec"),
        ("simplecache::s3://bucket/key", "chained"),
        ("zip://model.safetensors::s3://bucket/key", "chained"),
        ("https://huggingface.co/org/name", "the repository itself is 'org/name'"),
        ("s3://", "names no bucket"),
        ("s3:///key", "names no bucket"),
    ],
)
@pytest.mark.parametrize("use", [resolve, pin, open_checkpoint])
def test_what_is_no_url_of_a_store(use, ref, said):
    with pytest.raises(ValueError, match=said):
        use(ref)


def test_a_protocol_whose_package_is_absent():
    with pytest.raises(SourceError, match="needs a package that isn't installed"):
        open_checkpoint("oss://bucket/key")


@pytest.mark.parametrize("use", [pin, open_checkpoint])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"revision": "v1"}, "has no revision"),
        ({"token": "t0ken"}, "token is for a hub"),
        ({"subfolder": "../x"}, "leads out"),
        ({"storage_options": {"nosuch": 1}}, r"storage_options \[.*'nosuch'.*\] don't suit"),
    ],
)
def test_what_a_store_does_not_take(use, options, said):
    with pytest.raises(ValueError, match=said):
        use("s3://bucket/key", **options)


@pytest.mark.parametrize("ref", ["org/name", "hf://org/name", "."])
@pytest.mark.parametrize("use", [pin, open_checkpoint])
def test_storage_options_belong_to_stores(use, ref):
    with pytest.raises(ValueError, match="storage_options"):
        use(ref, storage_options={"key": "v"})


@pytest.mark.parametrize("scheme", ["file", "local", "FILE"])
@pytest.mark.parametrize("name", ["m", "m%25 [1]+#?"])
def test_files_by_url(client, tmp_path, scheme, name):
    """The path is taken as it is; nothing is copied anywhere."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(shard(["a"]))
    for ref in (f"{scheme}://{folder}", f"{scheme}://{folder}/model.safetensors"):
        checkpoint = open_checkpoint(ref)
        assert checkpoint.path("model.safetensors") == str(folder / "model.safetensors")
        assert pin(ref) is None
    with pytest.raises(NotFoundError, match="path not found"):
        open_checkpoint(f"{scheme}://{folder}/none")


def test_a_local_path_has_no_revision(tmp_path):
    with pytest.raises(ValueError, match="has no revision 'v1'"):
        open_checkpoint(tmp_path, revision="v1")


def test_a_pin_takes_no_options():
    with pytest.raises(ValueError, match=r"raywl\.sources\.pin"):
        open_checkpoint(HubPin("org/name", COMMIT), subfolder="x")


@pytest.mark.parametrize("subfolder", ["../x", "/x", "a/../../x"])
def test_a_subfolder_stays_inside(client, subfolder):
    with pytest.raises(ValueError, match="leads out"):
        open_checkpoint("org/name", subfolder=subfolder)
    assert client.count() == 0


# Which files


def test_the_index_decides_alone():
    files = sharded()
    indexed = indexed_files(files["model.safetensors.index.json"])
    assert weight_files(list(files), indexed) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


@pytest.mark.parametrize(
    "names",
    [
        ["model.safetensors"],
        ["model.safetensors", "consolidated.safetensors"],
        ["consolidated.safetensors", "consolidated-2.safetensors", "config.json"],
        ["model-10.safetensors", "model-2.safetensors", "sub/x.safetensors"],
        ["a.bin"],
        [],
    ],
    ids=str,
)
@pytest.mark.parametrize("raw", [None, b'{"weight_map": {}}', b'{"weight_map": {"a": "./x.safetensors"}}'])
def test_what_is_fetched_is_what_is_read(names, raw):
    """The manifest, which is made later and one layer up, picks the same files."""
    indexed = None if raw is None else indexed_files(raw)
    weight_map = None if raw is None else parse_index(raw, "index").weight_map
    assert sorted(choose_files(names, weight_map, format_of(names))) == weight_files(names, indexed)


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}', b"\xff"]
)
def test_a_damaged_index_names_nothing(raw):
    assert indexed_files(raw) is None


def test_companions_are_small_and_not_code():
    names = [
        "config.json", "LICENSE", "merges.txt", "tokenizer.model", "chat_template.jinja", "qwen.tiktoken",
        "modeling.py", "tokenizer.py", "tokenizer.bin", "sub/config.json", "x.safetensors", "x.gguf",
    ]  # fmt: skip
    assert companions(names) == [
        "chat_template.jinja", "config.json", "merges.txt", "qwen.tiktoken", "tokenizer.model",
    ]  # fmt: skip


def test_names_that_lead_out_are_not_of_the_folder():
    names = ["a", "s/b", "s/t/c", "../x", "s/../../x", "/etc/x", "s//x", "s/", "s\\..\\x", "sx/d"]
    assert folder_names(names, None) == ["a", "s/b", "s/t/c", "sx/d"]
    assert folder_names(names, "s") == ["b", "t/c"]
    assert folder_names(names, "./s/") == ["b", "t/c"]


def test_the_client_is_imported_when_it_is_needed():
    """It takes a third of a second, which `raywl inspect ./folder` doesn't have."""
    code = "import raywl.opening, sys; print({'huggingface_hub', 'filelock', 'torch'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "set()\n"
