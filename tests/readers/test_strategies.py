"""Every strategy brings the same bytes and the same errors, and says where it couldn't be used."""

from __future__ import annotations

import fcntl
import functools
import os
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import raywl
from raywl.errors import CheckpointError, CorruptFileError, MissingFileError
from raywl.node import page_cache
from raywl.readers import ways
from raywl.strategies import STRATEGIES

from .conftest import mappings_of, mounted, reader_threads

FILE = "model.safetensors"
every = pytest.mark.parametrize("strategy", STRATEGIES)


@functools.cache
def weights() -> dict[str, torch.Tensor]:
    """Runs and rows of many kinds, over several of each strategy's blocks, at odd places in the file."""
    generator = torch.Generator().manual_seed(0)

    def bits(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator)
        return raw.to(torch.uint8).view(dtype)

    return {
        "bytes": bits(5, dtype=torch.uint8),
        "columns": bits(1300, 1024, dtype=torch.int32),
        "empty": torch.empty(0, 4),
        "flags": bits(7, dtype=torch.uint8) % 2 == 0,
        "float8": bits(33, 65, dtype=torch.float8_e4m3fn),
        "large": bits((9 << 20) + 3, dtype=torch.uint8),
        "narrow": torch.randn(1000, 130, generator=generator).to(torch.bfloat16),
        "scalar": torch.tensor(1.5),
        "wide": torch.randn(70, 3000, generator=generator),
    }


class Loads(nn.Module):
    """Whole tensors, columns, conversions, transposes and pieces."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {name: (tuple(t.shape), t.dtype) for name, t in weights().items()}
        shapes["columns"] = (1300, 500), torch.int32
        shapes["narrow"] = (1000, 130), torch.float32
        shapes["wide"] = (3000, 70), torch.float32
        for name, (shape, dtype) in shapes.items():
            parameter = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
            self.register_parameter(name, parameter)

    def load_weights(self, stream) -> None:
        for name, weight in stream:
            if name == "columns":
                weight = weight[:, 500:1000]
            if name == "wide":
                weight = weight.t()
            self.get_parameter(name).copy_(weight)

    def check(self) -> None:
        expected = dict(weights())
        expected["columns"] = expected["columns"][:, 500:1000]
        expected["wide"] = expected["wide"].t()
        for name, parameter in self.named_parameters():
            want = expected[name].to(parameter.dtype).contiguous()
            assert torch.equal(parameter.view(-1).view(torch.uint8), want.view(-1).view(torch.uint8)), name


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    save_file(weights(), folder / FILE)
    return folder


@pytest.fixture
def folder(made, tmp_path):
    """A copy that a test may spoil."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / FILE).write_bytes((made / FILE).read_bytes())
    return tmp_path / "own"


@every
@pytest.mark.parametrize("cold", [True, False])
def test_the_same_bytes(made, strategy, cold):
    """Into parameters, by runs, rows and conversions; nothing stays open, mapped or running."""
    path = str(made / FILE)
    page_cache.drop(path) if cold else load_file(path)
    model = Loads()
    report = raywl.load_into(model, made, strategy=strategy)
    model.check()
    assert report.bytes_read == report.plan.nbytes == sum(report.bytes_by_file.values())
    assert not reader_threads()
    assert not mappings_of(path)
    assert not [fd for fd in os.listdir("/proc/self/fd") if _target(fd) == path]


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


@every
def test_the_iterator_gives_the_same_tensors(made, strategy):
    found = dict(raywl.open_checkpoint(made).iter_weights(strategy=strategy))
    expected = load_file(made / FILE)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


@every
@pytest.mark.parametrize("cut", ["before", "between"])
def test_a_file_that_is_cut_is_an_error(folder, strategy, cut):
    """With the file's name and no signal, whether it is cut before it is checked or before it is read."""
    checkpoint = raywl.open_checkpoint(folder)
    size = os.path.getsize(folder / FILE)

    def cut_it(*args):
        os.truncate(folder / FILE, size // 2)

    if cut == "before":
        cut_it()
    words = f"{size} bytes" if cut == "before" else r"ends at byte \d+, \d+ bytes before"
    with pytest.raises(CorruptFileError, match=words) as caught:
        # Progress is told first when all is checked and open.
        raywl.load_into(Loads(), checkpoint, strategy=strategy, progress=cut_it)
    assert str(folder / FILE) in str(caught.value)
    assert caught.value.partly_loaded == (cut == "between")
    assert not reader_threads()


@every
def test_a_file_that_has_gone_is_an_error(folder, strategy):
    checkpoint = raywl.open_checkpoint(folder)
    (folder / FILE).unlink()
    with pytest.raises(MissingFileError, match=FILE):
        raywl.load_into(Loads(), checkpoint, strategy=strategy)
    with pytest.raises(MissingFileError, match=FILE):
        list(checkpoint.iter_weights(strategy=strategy))


@every
def test_a_file_that_is_replaced_is_an_error(folder, strategy):
    checkpoint = raywl.open_checkpoint(folder)
    (folder / "other").write_bytes((folder / FILE).read_bytes())
    (folder / "other").replace(folder / FILE)
    with pytest.raises(CorruptFileError, match="replaced"):
        raywl.load_into(Loads(), checkpoint, strategy=strategy)


def test_direct_leaves_nothing_in_the_page_cache(folder):
    """And brings bytes that were written a moment ago."""
    path = str(folder / FILE)
    checkpoint = raywl.open_checkpoint(folder)
    page_cache.drop(path)
    if page_cache.resident_bytes(path) != 0:
        pytest.skip("this file system keeps its pages")
    model = Loads()
    report = raywl.load_into(model, checkpoint, strategy="direct")
    if report.notes:
        pytest.skip(f"no reads past the page cache here: {report.notes}")
    model.check()
    assert page_cache.resident_bytes(path) < 0.1 * os.path.getsize(path)


@pytest.mark.parametrize("refuses", ["open", "read"])
def test_direct_falls_back_where_it_is_refused(made, refuses, monkeypatch):
    """Some file systems refuse the flag, others the reads."""
    real_open, real_read = os.open, os.preadv

    def refuse_open(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real_open(path, flags, *args, **kwargs)

    def refuse_read(fd, buffers, offset):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real_read(fd, buffers, offset)

    if refuses == "open":
        monkeypatch.setattr(os, "open", refuse_open)
    else:
        monkeypatch.setattr(os, "preadv", refuse_read)
    model = Loads()
    report = raywl.load_into(model, made, strategy="direct")
    monkeypatch.undo()
    model.check()
    words = "takes no O_DIRECT" if refuses == "open" else "refuses reads past the page cache"
    assert [note for note in report.notes if words in note and note.startswith("direct: ")]


def test_a_mapping_is_let_go_of_while_it_is_read(made, monkeypatch):
    """Its pages count as the process's own: no more than a few blocks at a time do."""
    model = Loads()
    most = 0
    real = ways._Mapping.let_go

    def let_go(self, start, end):
        nonlocal most
        real(self, start, end)
        most = max(most, _mapped_bytes())

    monkeypatch.setattr(ways._Mapping, "let_go", let_go)
    raywl.load_into(model, made, strategy="mmap")
    model.check()
    assert most <= 8 * ways._MAPPED_STEP_BYTES


def _mapped_bytes() -> int:
    """Resident bytes of mapped weight files."""
    total, ours = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                ours = ".safetensors" in line
            elif ours and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
    return total


def test_an_old_kernel_maps_too(made, monkeypatch):
    """One that can't be asked to map pages in: sizes have to do."""
    monkeypatch.setattr(ways, "_POPULATE_READ", 9999)
    model = Loads()
    assert not raywl.load_into(model, made, strategy="mmap").notes
    model.check()


@pytest.mark.parametrize("fs_type", ["nfs4", "lustre", "fuse.s3", "cifs", "fuse", "unheardof"])
def test_nothing_is_mapped_on_a_file_system_of_other_machines(folder, fs_type, monkeypatch):
    mounted(folder, fs_type, monkeypatch)
    monkeypatch.setattr(ways, "map_privately", lambda *args: pytest.fail("a file was mapped"))
    model = Loads()
    report = raywl.load_into(model, folder, strategy="mmap")
    model.check()
    assert [note for note in report.notes if note.startswith(f"mmap: files on {fs_type} are read")]


@every
def test_on_fuse(made, fuse, strategy):
    """A real file system that isn't this machine's: the same bytes, and nothing is mapped."""
    (fuse.behind / FILE).write_bytes((made / FILE).read_bytes())
    model = Loads()
    report = raywl.load_into(model, fuse.path, strategy=strategy)
    model.check()
    said = {"auto": "prefetch on fuse.raywltest", "prefetch": "asked for", "mmap": "mmap: files on fuse."}
    assert [note for note in report.notes if said.get(strategy, "") in note] or strategy not in said


@every
def test_a_disk_error_names_file_and_byte(made, fuse, strategy):
    (fuse.behind / FILE).write_bytes((made / FILE).read_bytes())
    checkpoint = raywl.open_checkpoint(fuse.path)
    fuse.fail(eio={FILE: 6 << 20})
    with pytest.raises(CheckpointError, match=r"can't be read at byte \d+: Input/output error") as caught:
        raywl.load_into(Loads(), checkpoint, strategy=strategy)
    assert str(fuse.path / FILE) in str(caught.value)
    byte = int(re.search(r"at byte (\d+)", str(caught.value)).group(1))
    assert byte < os.path.getsize(fuse.behind / FILE)


@every
def test_a_file_that_is_cut_on_fuse_is_an_error(made, fuse, strategy):
    """Seen by the reads, since the size that the server tells is an old one."""
    whole = (made / FILE).read_bytes()
    (fuse.behind / FILE).write_bytes(whole)
    checkpoint = raywl.open_checkpoint(fuse.path)
    os.truncate(fuse.behind / FILE, len(whole) // 2)
    with pytest.raises(CorruptFileError, match=FILE):
        raywl.load_into(Loads(), checkpoint, strategy=strategy)
