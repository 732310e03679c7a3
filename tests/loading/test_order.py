"""What loaders see of what they wrote: as if every copy were made at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import raywl
from raywl.errors import ShapeMismatchError

from .conftest import Model, filled

pytestmark = pytest.mark.usefixtures("mapped_or_not")

A = torch.arange(12, dtype=torch.float32).reshape(3, 4)
B = A + 100


def by_hand(load, tensors, weights):
    """The model after the same loader ran on tensors in memory."""
    model = Model({name: tensor.clone() for name, tensor in tensors.items()}, load)
    with torch.no_grad():
        model.load_weights((name, weight.clone()) for name, weight in weights.items())
    return model


def check(write, load, tensors=None, weights=None):
    """Runs a loader lazily and eagerly; both models must be equal. Returns the lazy one and its report."""
    tensors = tensors or {"p": filled(3, 4), "q": filled(3, 4)}
    weights = weights or {"a": A, "b": B}
    expected = by_hand(load, tensors, weights)
    model = Model({name: tensor.clone() for name, tensor in tensors.items()}, load)
    report = raywl.load_into(model, write(weights), strict=False)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name)), name
    return model, report


def scale(model, weights):
    for name, w in weights:
        p = model.p if name == "a" else model.q
        p.copy_(w)
        p.mul_(2)


def copy_of_fn(model, weights):
    for name, w in weights:
        p = model.p if name == "a" else model.q
        p.data.copy_(w)
        p.data.copy_(torch.exp(p / 100))


def twice(model, weights):
    for _, w in weights:
        model.p.copy_(w)
        model.p[1:].copy_(w[:-1])
        model.q.copy_(model.p)


def masked(model, weights):
    for _, w in weights:
        model.p.copy_(w)
        model.p[model.p > 3] = 0
        model.q[torch.tensor([0, 2])] = w[1:]


def masked_by_lazy(model, weights):
    loaded = dict(weights)
    model.p.copy_(loaded["a"])
    model.p[torch.tensor([True, False, True])] = loaded["b"][:2]
    model.p[torch.tensor([1]), 1:3] = loaded["b"][:1, :2]
    model.q.copy_(loaded["b"])
    model.q[[0, 1]] = loaded["a"][1:]


def set_items(model, weights):
    loaded = dict(weights)
    model.p[:] = loaded["a"]
    model.p[0] = loaded["b"][2:3]
    model.p[1, 1:3] = loaded["b"][None, None, 0, :2]
    model.p[2, 2] = loaded["b"][0, 0]
    model.q[...] = loaded["a"][:, :1]
    model.q[0, 0] = loaded["b"][1, 1].view(1, 1)
    model.q[-1, ::2] = loaded["b"][0, 1:3]


def other_forms(model, weights):
    loaded = dict(weights)
    model.p.copy_(loaded["b"])
    model.p.copy_(other=loaded["a"])
    model.q.copy_(loaded["a"], True)
    torch.Tensor.copy_(model.q[0], loaded["b"][1], non_blocking=True)


def foreach(model, weights):
    loaded = dict(weights)
    torch._foreach_copy_([model.p, model.q], [loaded["a"], loaded["b"]])
    torch._foreach_copy_([model.p[0], model.q[1], model.q[2]], [loaded["b"][0], model.p[0], loaded["a"][2]])


def swapped(model, weights):
    loaded = dict(weights)
    model.p.copy_(loaded["a"])
    model.q.copy_(loaded["b"])
    model.p[0], model.q[0] = model.q[0].clone(), model.p[0].clone()


def alias_before(model, weights):
    array = model.p.data.numpy()
    for _, w in weights:
        model.p.copy_(w)
        array[0] += 1
    model.q.copy_(torch.from_numpy(array.copy()))


def storage_before(model, weights):
    whole = torch.empty(0).set_(model.p.data.untyped_storage(), 0, (12,), (1,))
    for _, w in weights:
        model.p.copy_(w)
        model.q.view(-1).copy_(whole)


def address_before(model, weights):
    import ctypes

    address = model.p.data_ptr()
    for _, w in weights:
        model.p.copy_(w)
        values = (ctypes.c_float * 12).from_address(address)
        model.q.view(-1).copy_(torch.tensor(list(values)))


def dlpack_before(model, weights):
    other = torch.from_dlpack(model.p.data)
    for _, w in weights:
        model.p.copy_(w)
        model.q.copy_(other + 1)


def initialised_between(model, weights):
    for _, w in weights:
        model.p.copy_(w)
        nn.init.zeros_(model.p)
        nn.init.constant_(model.q, 3)
        model.q[0].copy_(w[0])


def read_in_python(model, weights):
    for _, w in weights:
        model.p.copy_(w)
        if model.p.max() > 50:
            model.q.fill_(model.p[0, 0].item())
        else:
            model.q[0] = torch.tensor(model.p.tolist())[0]


def printed(model, weights):
    for _, w in weights:
        model.p.copy_(w)
        model.q[0, 0] = float(len(repr(model.p)))


def in_place_on_the_weight(model, weights):
    for _, w in weights:
        model.p.copy_(w)
        w.add_(1)
        w[0].mul_(2)
        model.q.copy_(w)


def out_is_a_parameter(model, weights):
    loaded = dict(weights)
    model.p.copy_(loaded["b"])
    torch.add(loaded["a"], loaded["b"], out=model.p)
    torch.add(model.p, 1, out=model.q)


def transposed(model, weights):
    for _, w in weights:
        model.p.t()[1:].copy_(w.t()[:-1])
        model.q.view(4, 3).copy_(w.reshape(4, 3))
        model.p[0] += w[1]


def data_swapped(model, weights):
    loaded = dict(weights)
    model.p.copy_(loaded["a"])
    model.p.data = torch.zeros(3, 4)
    model.p[1:].copy_(loaded["b"][1:])
    model.q.data = loaded["a"]
    model.q.add_(1)


def collected(model, weights):
    """Keeps parts until it has all of them."""
    held = []
    for _, w in weights:
        held.append(w[1:])
        if len(held) == 2:
            model.p[:2].copy_(torch.cat(held)[1:3])
            model.q.copy_(torch.stack([*held, held[0]])[:, 1])


ALL = [
    scale, copy_of_fn, twice, masked, masked_by_lazy, set_items, other_forms, foreach, swapped, alias_before,
    storage_before, address_before, dlpack_before, initialised_between, read_in_python, printed,
    in_place_on_the_weight, out_is_a_parameter, transposed, data_swapped, collected,
]  # fmt: skip


@pytest.mark.parametrize("load", ALL, ids=lambda load: load.__name__)
def test_loaders_see_what_they_wrote(write, load):
    check(write, load)


def test_values_that_a_loader_reads_are_counted(write):
    _, report = check(write, twice)
    assert report.bytes_read >= 2 * A.nbytes
    assert report.plan.unplanned


def test_one_memory_under_many_parameters(write):
    """Rows of one matrix, each a parameter, and the matrix itself: copies land in the order made."""
    memory = filled(3, 4)

    def load(model, weights):
        loaded = dict(weights)
        model.whole.copy_(loaded["a"])
        model.row.copy_(loaded["b"][0])
        model.column.copy_(loaded["b"][:, 3])
        model.last.copy_(loaded["a"][0])

    views = {"whole": memory, "row": memory[1], "column": memory[:, 0], "last": memory[2]}
    model = Model({name: nn.Parameter(view, False) for name, view in views.items()}, load)
    raywl.load_into(model, write({"a": A, "b": B}))
    expected = A.clone()
    expected[1] = B[0]
    expected[:, 0] = B[:, 3]
    expected[2] = A[0]
    assert torch.equal(memory, expected)


def test_copies_from_other_threads(write):
    """A loader that hands its copies to threads, while it goes on by itself."""
    weights = {f"w{i}": torch.full((64, 16), float(i)) for i in range(60)}

    def load(model, pairs):
        with ThreadPoolExecutor(4) as pool:
            futures = []
            for name, w in pairs:
                p = model.get_parameter(name)
                p[:32].copy_(w[:32])
                futures.append(pool.submit(p[32:].copy_, w[32:]))
                if name.endswith("7"):
                    p[0].add_(1)
            for future in futures:
                future.result()

    tensors = {name: filled(64, 16, value=-1.0) for name in weights}
    for _ in range(5):
        check(write, load, tensors, weights)


def test_a_thread_that_a_loader_starts_sees_what_was_written(write):
    def load(model, weights):
        for name, w in weights:
            p = model.p if name == "a" else model.q
            p.copy_(w)
            seen = []
            thread = threading.Thread(target=lambda p=p, seen=seen: seen.append(p.sum().item()))
            thread.start()
            thread.join()
            p[0, 0] = seen[0]

    check(write, load)


def test_a_thread_that_waits_for_the_loader_sees_what_was_written(write):
    """The copy comes after the thread was started."""

    def load(model, weights):
        loaded = dict(weights)
        written, seen = threading.Event(), []

        def look():
            written.wait(30)
            seen.append(model.p.sum().item())

        thread = threading.Thread(target=look)
        thread.start()
        model.p.copy_(loaded["a"])
        written.set()
        thread.join()
        model.q.fill_(seen[0])

    check(write, load)


def test_a_thread_that_writes_into_a_parameter(write):
    def load(model, weights):
        for _, w in weights:
            model.p.copy_(w)
            thread = threading.Thread(target=lambda: model.p.mul_(2))
            thread.start()
            thread.join()
        model.q.copy_(model.p)

    check(write, load)


def test_a_profiler_for_threads_is_left_as_it_was(write):
    before = threading.getprofile()
    check(write, twice)
    assert threading.getprofile() is before


def test_a_weight_used_after_the_next_ones_were_taken(write):
    """Names count as loaded whenever their weight is used, and a loader may stop early."""

    def load(model, weights):
        first = None
        for name, w in weights:
            if name == "a":
                first = w
            elif name == "b":
                model.q.copy_(w)
                break
        model.p.copy_(first)

    model = Model({"p": filled(3, 4), "q": filled(3, 4)}, load)
    with pytest.warns(UserWarning, match="1 tensors .*: c"):
        report = raywl.load_into(model, write({"a": A, "b": B, "c": A.clone()}))
    assert sorted(report.loaded) == ["a", "b"]
    assert report.unexpected == ["c"]
    assert torch.equal(model.p, A)
    assert torch.equal(model.q, B)


def test_weights_are_not_all_held_at_once(write):
    """A loader that keeps none has one alive at a time, whatever the number of tensors."""
    import gc
    import weakref

    alive = []

    def load(model, weights):
        for _, w in weights:
            model.p.copy_(w)
            alive.append(weakref.ref(w))
            del w
            gc.collect()
            assert sum(ref() is not None for ref in alive) <= 2

    raywl.load_into(Model({"p": filled(3, 4)}, load), write({f"w{i}": A + i for i in range(20)}))


def test_a_destination_that_repeats_itself_is_refused_as_torch_does(write):
    def load(model, weights):
        for _, w in weights:
            model.p[0, :1].expand(3, 4).copy_(w)

    with pytest.raises(RuntimeError, match="single memory location"):
        raywl.load_into(Model({"p": filled(3, 4)}, load), write({"a": A}))


def test_shapes_that_do_not_broadcast_are_refused_by_name(write):
    def load(model, weights):
        for _, w in weights:
            model.p.copy_(w[:2])

    with pytest.raises(ShapeMismatchError, match=r"a: .*expected .3, 4., got .2, 4."):
        raywl.load_into(Model({"p": filled(3, 4)}, load), write({"a": A}))
