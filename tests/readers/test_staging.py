"""Reads through buffers that a device copies out of: the CPU, or a device that takes its time."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from torch import nn

import raywl
from raywl.errors import CheckpointError
from raywl.node import numa
from raywl.readers import reader as reader_module
from raywl.readers import staging
from raywl.readers.execute import execute
from raywl.readers.staging import HostCarrier, Stage, place
from raywl.strategies import STRATEGIES

from .test_strategies import FILE, Loads, made, weights  # noqa: F401


@pytest.fixture
def staged(monkeypatch):
    """All reads of a load go through the buffers."""
    monkeypatch.setattr(reader_module, "execute", partial(execute, staged=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_bytes(made, strategy, staged):  # noqa: F811
    """Whatever way they come into the buffers, and whatever has to be done to them on the way out."""
    model = Loads()
    report = raywl.load_into(model, made, strategy=strategy)
    model.check()
    assert report.bytes_read == report.plan.nbytes


class Event:
    """Something that a slow device will have done at some time."""

    def __init__(self, todo):
        self._todo = todo

    def synchronize(self):
        while self._todo:
            self._todo.pop(0)()


class SlowCarrier:
    """Copies only when it is waited for: too late for who doesn't wait."""

    made = 0
    in_flight = 0
    most = 0

    def __init__(self):
        SlowCarrier.made += 1
        self._events = []

    def send(self, buffer, nbytes, first, pieces):
        def copy(piece, target):
            place(piece, buffer.raw, first, target)
            SlowCarrier.in_flight -= 1

        SlowCarrier.in_flight += len(pieces)
        SlowCarrier.most = max(SlowCarrier.most, SlowCarrier.in_flight)
        event = Event([partial(copy, piece, target) for piece, target in pieces])
        buffer.busy.append(event)
        self._events.append(event)

    def finish(self):
        for event in self._events:
            event.synchronize()


@pytest.fixture
def slow(staged, monkeypatch):
    monkeypatch.setattr(staging, "_carrier_for", lambda device, nbytes: SlowCarrier())
    SlowCarrier.made = SlowCarrier.in_flight = SlowCarrier.most = 0
    return SlowCarrier


def test_a_buffer_is_waited_for_before_it_is_read_into_again(made, slow, monkeypatch):  # noqa: F811
    """Many reads, two buffers to a thread: everything arrives whole, and some copies do overlap reads."""
    monkeypatch.setattr("raywl.plan.reads.WINDOW_BYTES", 1 << 18)
    model = Loads()
    report = raywl.load_into(model, made, strategy="buffered")
    model.check()
    assert len(report.plan.reads) > 30
    assert slow.in_flight == 0
    assert slow.most > 1
    assert 1 <= slow.made <= 6


def test_a_failing_read_leaves_nothing_under_way(made, fuse, slow):  # noqa: F811
    (fuse.behind / FILE).write_bytes((made / FILE).read_bytes())
    checkpoint = raywl.open_checkpoint(fuse.path)
    fuse.fail(eio={FILE: 6 << 20})
    before = set(threading.enumerate())
    with pytest.raises(CheckpointError, match="can't be read at byte"):
        raywl.load_into(Loads(), checkpoint, strategy="buffered")
    assert slow.in_flight == 0
    assert not set(threading.enumerate()) - before


def test_buffers_are_as_long_as_the_longest_read():
    """Two of them, made when they are first needed; not rounded up to a power of two."""
    stage = Stage((5 << 20) + 1)
    assert not stage._buffers
    buffers = [stage.next_buffer(torch.device("cpu")) for _ in range(4)]
    assert buffers[0] is buffers[2] is not buffers[1] is buffers[3]
    assert len({buffer.raw.data_ptr() for buffer in buffers}) == 2
    assert all(buffer.raw.numel() == (5 << 20) + 1 + 64 for buffer in buffers)
    stage.close()
    assert not stage._buffers


def test_pieces_go_to_the_carriers_of_their_devices(monkeypatch):
    """Parameters on several devices in one read: one carrier each, and the buffer waits for all of them."""
    sent = []

    class Carrier(HostCarrier):
        def __init__(self, device):
            self.device = device

        def send(self, buffer, nbytes, first, pieces):
            sent.append((self.device.type, [piece for piece, _ in pieces]))

    class View:
        def __init__(self, kind):
            self.device = torch.device(kind)

    monkeypatch.setattr(staging, "_carrier_for", lambda device, nbytes: Carrier(device))
    stage = Stage(100)
    buffer = stage.next_buffer(torch.device("cpu"))
    stage.send(buffer, 100, 0, [("a", View("cpu")), ("b", View("meta")), ("c", View("cpu"))])
    stage.send(buffer, 100, 0, [("d", View("meta"))])
    assert sent == [("cpu", ["a", "c"]), ("meta", ["b"]), ("meta", ["d"])]
    stage.close()


def test_only_what_no_read_can_reach_is_staged(made, monkeypatch):  # noqa: F811
    """Parameters of the host are read into, whatever else the model has."""
    seen = []
    real = staging.Stage.send
    monkeypatch.setattr(
        staging.Stage,
        "send",
        lambda self, buffer, nbytes, first, pieces: (
            seen.extend(piece.target for piece, _ in pieces),
            real(self, buffer, nbytes, first, pieces),
        )[1],
    )
    real_execute = reader_module.execute

    def far(reads, files, targets, **more):
        targets["large"].in_reach = False
        real_execute(reads, files, targets, **more)

    monkeypatch.setattr(reader_module, "execute", far)
    model = Loads()
    raywl.load_into(model, made, strategy="buffered")
    model.check()
    # What lies beside it in the file may share its read.
    assert "large" in seen
    assert "columns" not in seen


# Memory near a device.


def test_the_node_of_a_device(tmp_path):
    for node in (0, 1):
        (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
    device = tmp_path / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    assert numa.num_nodes(str(tmp_path)) == 2
    assert numa.node_of_pci("0000:3b:00.0", str(tmp_path)) == 1
    assert numa.node_of_pci("0000:00:00.0", str(tmp_path)) is None
    (device / "numa_node").write_text("-1\n")
    assert numa.node_of_pci("0000:3b:00.0", str(tmp_path)) is None


def test_a_machine_of_one_node_has_nothing_to_choose(tmp_path):
    (tmp_path / "devices/system/node/node0").mkdir(parents=True)
    assert numa.num_nodes(str(tmp_path)) == 1
    assert numa.node_of_pci("0000:3b:00.0", str(tmp_path)) is None
    assert numa.num_nodes(str(tmp_path / "absent")) == 1


def test_memory_is_bound_where_the_kernel_lets_it():
    """And stays usable where it doesn't."""
    import mmap

    memory = torch.frombuffer(mmap.mmap(-1, 1 << 20), dtype=torch.uint8)
    assert numa.bind_memory(memory.data_ptr(), 1 << 20, 0) in (True, False)
    assert not numa.bind_memory(memory.data_ptr(), 1 << 20, 1023)
    assert not numa.bind_memory(memory.data_ptr(), 1 << 20, -1)
    memory.fill_(3)
    assert int(memory.sum()) == 3 << 20


# On real GPUs.


def needs_gpu(test):
    """Marks a test as one for machines with a GPU."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")(test))


def on_gpu(device: str) -> Loads:
    model = Loads().to(device)
    for parameter in model.parameters():
        parameter.data.zero_()
    return model


@needs_gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_onto_a_gpu(made, strategy):  # noqa: F811
    model = on_gpu("cuda:0")
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    raywl.load_into(model, made, strategy=strategy)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    model.cpu().check()


@needs_gpu
def test_onto_several_devices(made):  # noqa: F811
    """Every GPU that there is, and the host."""
    model = Loads()
    devices = [*(f"cuda:{index}" for index in range(torch.cuda.device_count())), "cpu"]
    for number, (name, parameter) in enumerate(list(model.named_parameters())):
        moved = nn.Parameter(parameter.to(devices[number % len(devices)]), requires_grad=False)
        model.register_parameter(name, moved)
    raywl.load_into(model, made)
    model.cpu().check()


@needs_gpu
def test_onto_a_gpu_out_of_meta(made):  # noqa: F811
    with torch.device("meta"):
        model = Loads()
    raywl.load_into(model, made, device="cuda:0")
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    model.cpu().check()


@needs_gpu
def test_buffers_for_a_gpu_are_pinned():
    stage = Stage((5 << 20) + 1)
    buffer = stage.next_buffer(torch.device("cuda:0"))
    assert buffer.raw.is_pinned()
    assert buffer.raw.numel() == (5 << 20) + 1 + 64
    stage.close()
