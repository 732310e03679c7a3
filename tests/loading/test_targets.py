"""Parameters and buffers of every kind: tied, shared, strided, on meta, computed, subclassed."""

from __future__ import annotations

import gc

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import raywl
from raywl.errors import CheckpointError, MissingWeightsError, ShapeMismatchError

from .conftest import Model, filled, mappings, open_fds, reader_threads

A = torch.arange(12, dtype=torch.float32).reshape(3, 4)
B = A + 100


class Tied(nn.Module):
    """An embedding and a head that share their weight, in one of several ways."""

    def __init__(self, how="object"):
        super().__init__()
        self.embed = nn.Embedding(3, 4)
        self.head = nn.Linear(4, 3, bias=False)
        if how == "object":
            self.head.weight = self.embed.weight
        elif how == "memory":
            self.head.weight.data = self.embed.weight.data
        elif how == "parameter of the same memory":
            self.head.weight = nn.Parameter(self.embed.weight.detach())


WAYS = ["object", "memory", "parameter of the same memory"]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(
    "names", [("embed.weight",), ("head.weight",), ("embed.weight", "head.weight")], ids=str
)
def test_tied_weights_need_one_of_their_names(write, how, names):
    """When both are there, the model's first name counts, in whatever file it lies."""
    values = {"embed.weight": A, "head.weight": B}
    files = [{name: values[name]} for name in reversed(names)]
    model = Tied(how)
    address = model.embed.weight.data_ptr()
    report = raywl.load_into(model, write(*files))
    expected = values[names[0]]
    assert torch.equal(model.embed.weight, expected)
    assert torch.equal(model.head.weight, expected)
    assert model.embed.weight.data_ptr() == model.head.weight.data_ptr() == address
    assert report.missing == report.unexpected == []
    assert sorted([*report.loaded, *report.skipped]) == sorted(names)
    if len(names) == 2:
        assert "tied" in report.skipped["head.weight"]


@pytest.mark.parametrize("how", WAYS)
def test_tied_weights_that_nothing_sets_are_missing(write, how):
    model = Tied(how)
    before = model.embed.weight.detach().clone()
    with pytest.raises(MissingWeightsError, match=r"embed\.weight"), pytest.warns(UserWarning, match="other"):
        raywl.load_into(model, write({"other": A}))
    assert torch.equal(model.embed.weight, before)


@pytest.mark.parametrize(
    "names", [("embed.weight",), ("head.weight",), ("embed.weight", "head.weight")], ids=str
)
def test_ties_survive_on_meta(write, names):
    with torch.device("meta"):
        model = Tied()
    raywl.load_into(model, write({name: A.clone() for name in names}))
    assert model.embed.weight is model.head.weight
    assert torch.equal(model.head.weight, A)


def test_a_module_that_is_used_twice(write):
    """Every name of its parameters will do."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(4, 3, bias=False)
            self.two = self.one
            self.deep = nn.ModuleDict({"again": self.one})

    for names in (["one.weight"], ["two.weight"], ["deep.again.weight", "one.weight"]):
        with torch.device("meta"):
            model = Shared()
        report = raywl.load_into(model, write({name: A.clone() for name in names}))
        assert torch.equal(model.two.weight, A)
        assert model.one is model.two is model.deep["again"]
        assert not report.missing


def test_parameters_that_are_parts_of_one_storage(write):
    """A flat buffer of parameters; also in the checkpoint as a whole."""
    flat = filled(100)
    parts = {f"p{i}": nn.Parameter(flat[10 * i : 10 * i + 10].view(2, 5), False) for i in range(10)}
    weights = {f"p{i}": torch.full((2, 5), float(i)) for i in range(10)}
    raywl.load_into(Model(parts), write(weights))
    assert torch.equal(flat, torch.arange(10.0).repeat_interleave(10))


def test_four_scalars_of_one_storage(write):
    storage = filled(4)
    model = Model({f"s{i}": nn.Parameter(storage[i], False) for i in range(4)})
    raywl.load_into(model, write({f"s{i}": torch.tensor(float(i)) for i in range(4)}))
    assert storage.tolist() == [0, 1, 2, 3]


def test_a_parameter_inside_another_is_set_with_it(write):
    whole = filled(3, 4)
    model = Model({"whole": nn.Parameter(whole, False), "row": nn.Parameter(whole[1], False)})
    report = raywl.load_into(model, write({"whole": A}))
    assert report.missing == []
    assert torch.equal(model.row, A[1])


def test_a_parameter_partly_inside_another_is_named(write):
    flat = filled(6)
    with torch.device("meta"):
        rest = nn.Parameter(torch.empty(2), False)
    model = Model({"one": nn.Parameter(flat[:4], False), "two": nn.Parameter(flat[2:], False), "rest": rest})
    report = raywl.load_into(model, write({"one": torch.arange(4.0), "rest": torch.zeros(2)}), strict=False)
    assert report.partial == {"two": "8 of 16 bytes are set"}


def test_overlapping_parameters_are_set_in_the_checkpoints_order(write):
    flat = filled(6)
    model = Model({"one": nn.Parameter(flat[:4], False), "two": nn.Parameter(flat[2:], False)})
    raywl.load_into(model, write({"one": torch.arange(4.0), "two": torch.arange(4.0) + 10}))
    assert flat.tolist() == [0, 1, 10, 11, 12, 13]


def test_a_loader_that_sets_the_same_part_twice_leaves_a_hole(write):
    """Bytes are counted once each: a wrong offset in a loader isn't taken for a whole parameter."""

    def load(model, weights):
        for _, w in weights:
            model.p[:2].copy_(w[:2])

    with torch.device("meta"):
        model = Model({"p": torch.empty(4, 4)}, load)
    with pytest.raises(MissingWeightsError, match=r"p \(32 of 64 bytes are set\)"):
        raywl.load_into(model, write({"a": A, "b": B}))
    assert model.p.is_meta

    def load_and_look(model, weights):
        for _, w in weights:
            model.p[:2].copy_(w[:2])
            model.p.max()

    with torch.device("meta"):
        model = Model({"p": torch.empty(4, 4)}, load_and_look)
    with pytest.raises(MissingWeightsError, match=r"p \(32 of 64 bytes are set\)"):
        raywl.load_into(model, write({"a": A, "b": B}))


@pytest.mark.parametrize("meta", [False, True])
def test_strides_are_kept(write, meta):
    """Parameters that lie transposed, channels last, or with room between rows."""
    device = "meta" if meta else "cpu"
    tensors = {
        "transposed": torch.empty(4, 3, device=device).t(),
        "last": torch.empty(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last),
        "permuted": torch.empty(4, 2, 3, device=device).permute(1, 2, 0),
    }
    if not meta:
        tensors["rows"] = filled(3, 10)[:, 2:6]
        tensors["steps"] = filled(7, 4)[1::2]
    strides = {name: tensor.stride() for name, tensor in tensors.items()}
    weights = {name: torch.randn(tensor.shape) for name, tensor in tensors.items()}
    model = Model({name: nn.Parameter(tensor, False) for name, tensor in tensors.items()})
    raywl.load_into(model, write(weights))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]), name
        assert parameter.stride() == strides[name], name


class Custom(nn.Parameter):
    """A parameter with a class and attributes of its own."""

    def describe(self):
        return f"custom {self.kind}"


def test_class_and_attributes_survive_meta(write):
    with torch.device("meta"):
        model = Model({"p": torch.empty(3, 4)})
        model.p = Custom(torch.empty(3, 4), requires_grad=False)
        model.q = nn.Parameter(torch.empty(3, 4))
    model.p.kind = "x"
    model.q.kind = {"y": 1}
    model.p.hook_like = print
    raywl.load_into(model, write({"p": A, "q": B}))
    assert type(model.p) is Custom
    assert model.p.describe() == "custom x"
    assert model.p.hook_like is print
    assert not model.p.requires_grad
    assert model.q.requires_grad
    assert model.q.kind == {"y": 1}
    assert type(model.q) is nn.Parameter
    assert model.q.is_leaf
    assert torch.equal(model.p, A)


def test_addresses_of_materialised_parameters_stay(write):
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    objects = dict(model.named_parameters())
    raywl.load_into(model, write({name: torch.randn(p.shape) for name, p in model.named_parameters()}))
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == addresses
    assert all(model.get_parameter(name) is p for name, p in objects.items())


def test_a_model_partly_on_meta(write):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 3, device="meta"))
    weights = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
    raywl.load_into(model, write(weights))
    for name, p in model.named_parameters():
        assert torch.equal(p, weights[name])
        assert p.requires_grad


class Rotary(nn.Module):
    """A parameter, a persistent buffer, and one that it computes."""

    def __init__(self, how="reset_buffers"):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("inv_freq", self._frequencies(), persistent=False)
        if how is not None:
            setattr(self, how, self._reset)

    def _frequencies(self):
        return 1.0 / torch.arange(1, 5)

    def _reset(self):
        self.inv_freq.copy_(self._frequencies())


@pytest.mark.parametrize("how", ["reset_buffers", "reset_parameters", "init_weights"])
def test_a_computed_buffer_on_meta_is_made_by_the_model(write, how):
    with torch.device("meta"):
        model = Rotary(how)
    report = raywl.load_into(model, write({"weight": A, "mean": torch.ones(4)}))
    assert torch.equal(model.inv_freq, 1.0 / torch.arange(1, 5))
    assert torch.equal(model.mean, torch.ones(4))
    assert report.missing == []


def test_a_computed_buffer_that_nothing_makes_is_named(write):
    with torch.device("meta"):
        model = Rotary(None)
    with pytest.raises(MissingWeightsError, match="inv_freq") as caught:
        raywl.load_into(model, write({"weight": A, "mean": torch.ones(4)}))
    assert caught.value.names == ("inv_freq",)
    assert not caught.value.partly_loaded
    assert model.weight.is_meta
    report = raywl.load_into(model, write({"weight": A, "mean": torch.ones(4)}), strict=False)
    assert report.missing == ["inv_freq"]
    assert model.inv_freq.is_meta


def test_a_computed_buffer_in_memory_is_left_alone(write):
    model = Rotary(None)
    with torch.no_grad():
        model.inv_freq.fill_(5)
    folder = write({"weight": A, "mean": torch.ones(4), "inv_freq": torch.zeros(4)})
    report = raywl.load_into(model, folder)
    assert torch.equal(model.inv_freq, torch.full((4,), 5.0))
    assert "computes itself" in report.skipped["inv_freq"]


def test_making_a_buffer_writes_to_no_parameter_in_memory(write):
    """`reset_parameters` of a module that is only partly on meta would draw its weights anew."""

    class Half(nn.Linear):
        def __init__(self):
            super().__init__(4, 3, bias=False)
            self.register_buffer("table", torch.empty(3, device="meta"), persistent=False)

        def reset_parameters(self):
            super().reset_parameters()
            if hasattr(self, "table"):
                self.table.fill_(2)

    model = Half()
    before = model.weight.detach().clone()
    state = torch.random.get_rng_state()
    report = raywl.load_into(model, write({"other": A}), strict=False)
    assert torch.equal(model.weight, before)
    assert torch.equal(model.table, torch.full((3,), 2.0))
    assert report.missing == ["weight"]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_missing_persistent_buffer_is_named(write):
    with pytest.raises(MissingWeightsError, match="mean"):
        raywl.load_into(Rotary(), write({"weight": A}))


def test_a_parameter_that_has_no_shape_yet_is_refused(write):
    with pytest.raises(ValueError, match="weight has no shape yet"):
        raywl.load_into(nn.LazyLinear(3), write({"weight": A}))


@pytest.mark.parametrize(
    ("param", "tensor", "fits"),
    [
        ((), (), True), ((1,), (), True), ((), (1,), True), ((1, 1), (1,), True), ((0,), (0,), True),
        ((0, 4), (0, 4), True), ((3, 0), (3, 0), True), ((3,), (1,), False), ((3, 4), (3, 1), False),
        ((3, 4), (1,), False), ((3, 4), (4, 3), False), ((12,), (3, 4), False), ((0, 3), (0, 4), False),
        ((3, 4), (3, 4, 1), False), ((2, 4), (3, 4), False), ((0,), (1,), False), ((1,), (0,), False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("meta", [False, True], ids=["on CPU", "on meta"])
def test_shapes_fit_or_are_named(write, param, tensor, fits, meta):
    """Nothing is broadcast; one element goes into one element."""
    value = torch.randn(tensor)
    model = Model({"p": torch.zeros(param, device="meta" if meta else "cpu")})
    folder = write({"p": value})
    if fits:
        raywl.load_into(model, folder)
        assert model.p.shape == param
        assert torch.equal(model.p.reshape(-1), value.reshape(-1))
        return
    with pytest.raises(ShapeMismatchError) as caught:
        raywl.load_into(model, folder)
    assert str(list(param)) in str(caught.value)
    assert str(list(tensor)) in str(caught.value)
    assert caught.value.tensor == "p"
    assert not caught.value.partly_loaded
    assert model.p.is_meta == meta
    assert meta or not model.p.any()


def test_many_sizes_at_odd_offsets(tmp_path):
    """Tensors behind others of one byte lie at any byte of the file."""
    weights = {}
    for index, dtype in enumerate(
        [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.complex64]
    ):
        weights[f"a{index}"] = torch.ones(1 + 2 * index, dtype=torch.uint8)
        weights[f"b{index}"] = torch.randn(5, 7).to(dtype)
    # The library sorts by width; this file must not be.
    write_unsorted(tmp_path / "model.safetensors", weights)
    checkpoint = raywl.open_checkpoint(tmp_path)
    assert any(entry.start % 8 for name, entry in checkpoint.tensors.items() if name.startswith("b"))
    whole = Model({name: torch.zeros_like(tensor) for name, tensor in weights.items()})
    raywl.load_into(whole, checkpoint)

    def load(model, pairs):
        for name, w in pairs:
            if name.startswith("b"):
                model.get_parameter(name).t()[1:].copy_(w.t()[:-1])
                assert torch.equal(w[0], weights[name][0])
            else:
                model.get_parameter(name).copy_(w)

    lazy = Model({name: torch.zeros_like(tensor) for name, tensor in weights.items()}, load)
    raywl.load_into(lazy, checkpoint, strict=False)
    wide = Model({n: torch.zeros_like(t, dtype=torch.complex64) for n, t in weights.items()})
    raywl.load_into(wide, checkpoint)
    for name, tensor in weights.items():
        assert torch.equal(whole.get_parameter(name), tensor), name
        assert torch.equal(wide.get_parameter(name), tensor.to(torch.complex64)), name
        if name.startswith("b"):
            assert torch.equal(lazy.get_parameter(name)[:, 1:], tensor[:, :-1]), name
    assert dict(checkpoint.iter_weights()).keys() == weights.keys()
    for name, tensor in checkpoint.iter_weights():
        assert torch.equal(tensor, weights[name])


def write_unsorted(path, tensors):
    """A file with its tensors in the order given, byte after byte."""
    import json
    import struct

    names = {torch.uint8: "U8", torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16",
             torch.int64: "I64", torch.complex64: "C64"}  # fmt: skip
    header, blob = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [len(blob), len(blob) + len(raw)]}  # fmt: skip
        blob += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + blob)


def test_nothing_is_left_open(write):
    def load(model, weights):
        for name, w in weights:
            model.get_parameter(name).copy_(w)
            w.max()

    before = (open_fds(), mappings())
    folder = write({"a": A}, {"b": B})
    tensors = {"a": filled(3, 4), "b": filled(3, 4)}
    raywl.load_into(Model(tensors), folder)
    raywl.load_into(Model(tensors, load), folder)
    with pytest.raises(MissingWeightsError):
        raywl.load_into(Model({**tensors, "c": filled(1)}, load), folder)
    list(raywl.open_checkpoint(folder).iter_weights())
    gc.collect()
    assert (open_fds(), mappings()) == before
    assert reader_threads() == []


def test_one_tensor_for_two_places_and_two_for_one(write, tmp_path):
    class Mapper:
        def map_name(self, name):
            return {"a": "p", "b": "p"}[name]

    with pytest.raises(CheckpointError, match=r"(?s)tensor 'b'.*p.*a.*which one counts"):
        raywl.load_into(Model({"p": filled(3, 4)}), write({"a": A, "b": B}), mapper=Mapper())
    save_file({"a": A}, tmp_path / "x.safetensors")
