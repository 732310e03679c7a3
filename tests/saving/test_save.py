"""What ranks save is what was loaded, or what the model has; whole, or not there at all."""

from __future__ import annotations

import json
import os
import shutil
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import raywl
from raywl import ParallelContext, Replicate, Shard
from raywl.errors import CapacityError, CheckpointError, RaywlError
from raywl.loaders import (
    ExpertLoader,
    MergedColumnLoader,
    QKVLoader,
    VocabLoader,
    composed_weight_loader,
    default_weight_loader,
    sharded_weight_loader,
)
from raywl.remap.experts import make_expert_params_mapping
from raywl.saving import save
from raywl.saving.files import write_part

UNFINISHED = "unfinished-save"


def tp(rank, size):
    return ParallelContext(tp_rank=rank, tp_size=size)


def model_of(**tensors):
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return model


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def saved_in(folder):
    return dict(raywl.open_checkpoint(folder).iter_weights())


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
          torch.bool, torch.int64, torch.uint16, torch.complex64]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_lone_rank(tmp_path, dtype):
    """Bit for bit, strided or not; safetensors itself reads it, too."""
    raw = (torch.arange(48 * dtype.itemsize) % 2).to(torch.uint8).view(dtype)
    tensors = {"plain": raw.view(8, 6), "turned": raw.view(6, 8).t(), "gaps": raw.view(8, 6)[:, ::2]}
    report = raywl.save_sharded(model_of(**tensors), tmp_path / "out")
    assert list(report.files) == ["model.safetensors"]
    assert report.nbytes == (48 + 48 + 24) * dtype.itemsize
    assert report.waiting_for == []
    found = saved_in(tmp_path / "out")
    for name, tensor in tensors.items():
        assert found[name].shape == tensor.shape
        assert found[name].dtype == dtype
        assert bits(found[name]) == bits(tensor)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert sorted(file.keys()) == sorted(tensors)
        assert file.metadata() == {"format": "pt"}
    zeros = torch.zeros(48 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    model = model_of(plain=zeros.view(8, 6), turned=zeros.clone().view(8, 6), gaps=zeros[:24].view(8, 3))
    raywl.load_into(model, tmp_path / "out", strict="exact")
    assert bits(model.turned) == bits(tensors["turned"])


def test_tied_nested_and_empty_weights(tmp_path):
    """C44: four scales in one storage, four without elements, which all lie at address 0; a tie, a part."""
    storage = torch.tensor([1.0, 2.0, 3.0, 4.0])
    names = [f"{letter}_scale" for letter in ("q", "k", "v", "prob")]
    fused = torch.arange(12.0).view(6, 2)
    model = model_of(
        **{name: storage[i] for i, name in enumerate(names)},
        **{f"{name}_zero": torch.empty(0, 3) for name in names},
        qkv=fused,
        k=fused[2:4],
    )
    assert len({getattr(model, f"{name}_zero").data_ptr() for name in names}) == 1
    model.head, model.embed = nn.Linear(3, 2, bias=False), nn.Module()
    model.embed.weight = model.head.weight
    model.register_buffer("steps", torch.tensor(7))
    model.register_buffer("cache", torch.ones(3), persistent=False)
    raywl.save_sharded(model, tmp_path / "out")
    found = saved_in(tmp_path / "out")
    zeros = [f"{name}_zero" for name in names]
    assert sorted(found) == sorted([*names, *zeros, "qkv", "k", "head.weight", "steps"])
    assert [found[name].item() for name in names] == [1, 2, 3, 4]
    assert all(found[name].shape == (0, 3) for name in zeros)
    assert found["k"].tolist() == [[4, 5], [6, 7]]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for tensor in model.state_dict().values():
        tensor.zero_()
    raywl.load_into(model, tmp_path / "out", strict="exact")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def one_rank(shapes, specs, rank, size):
    """A model with the rank's part of each tensor, cut as DTensor cuts."""
    tensors = {}
    for name, shape in shapes.items():
        local = list(shape)
        if isinstance(specs[name], Shard):
            each = -(-shape[specs[name].dim] // size)
            local[specs[name].dim] = max(0, min(each, shape[specs[name].dim] - rank * each))
        tensors[name] = torch.zeros(local)
    return model_of(**tensors)


@st.composite
def cut_models(draw):
    shapes, specs = {}, {}
    for name in draw(st.sets(st.sampled_from("abcd"), min_size=1)):
        shapes[name] = draw(st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple))
        dims = st.sampled_from(range(len(shapes[name]))) if shapes[name] else st.nothing()
        specs[name] = draw(st.just(Replicate()) | dims.map(Shard))
    return shapes, specs


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cut=cut_models(),
    size=st.integers(1, 4),
    other=st.integers(1, 4),
    data=st.data(),
    limit=st.sampled_from([1, 100, 10**9]),
)
def test_law_what_was_loaded_is_what_is_saved(tmp_path_factory, cut, size, other, data, limit):
    """However it is cut, also unevenly, and in whatever order ranks come; then on another number of ranks."""
    shapes, specs = cut
    folder = tmp_path_factory.mktemp("law")
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    order = data.draw(st.permutations(range(size)))
    for number, rank in enumerate(order):
        model = one_rank(shapes, specs, rank, size)
        raywl.load_into(model, folder, parallel=tp(rank, size), shards=specs)
        report = raywl.save_sharded(model, folder / "out", parallel=tp(rank, size), max_file_bytes=limit)
        assert sorted(report.waiting_for) == sorted(order[number + 1 :])
        assert bool(report.files) == (number == size - 1)
    found = saved_in(folder / "out")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
    for rank in range(other):
        model = one_rank(shapes, specs, rank, other)
        raywl.load_into(model, folder / "out", parallel=tp(rank, other), shards=specs, strict="exact")
        expected = one_rank(shapes, specs, rank, other)
        raywl.load_into(expected, folder, parallel=tp(rank, other), shards=specs)
        for one, wanted in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(one, wanted)


def test_tensors_without_elements_are_loaded_and_saved(tmp_path):
    save_file({"none": torch.zeros(0, 3), "w": torch.ones(2)}, tmp_path / "model.safetensors")
    for rank in range(3):
        model = model_of(none=torch.zeros(0, 3), w=torch.ones(int(rank < 2)))
        raywl.load_into(model, tmp_path, parallel=tp(rank, 3), shards={"w": Shard(0)})
        raywl.save_sharded(model, tmp_path / "out", parallel=tp(rank, 3))
    found = saved_in(tmp_path / "out")
    assert {name: list(tensor.shape) for name, tensor in found.items()} == {"none": [0, 3], "w": [2]}


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(1, 4), part=st.lists(st.integers(1, 5), min_size=1, max_size=3), data=st.data())
def test_law_models_that_were_never_loaded(tmp_path_factory, size, part, data):
    """By `shards` alone, under the model's own names."""
    dim = data.draw(st.integers(-len(part), len(part) - 1))
    whole = list(part)
    whole[dim] *= size
    tensor, folder = torch.randn(whole), tmp_path_factory.mktemp("made")
    for rank, mine in enumerate(tensor.chunk(size, dim)):
        raywl.save_sharded(
            model_of(w=mine.clone()), folder / "out", parallel=tp(rank, size), shards={"w": Shard(dim)}
        )
    assert torch.equal(saved_in(folder / "out")["w"], tensor)


class Layer(nn.Module):
    """All loaders that raywl has, with padding, key heads on several ranks, and quantised companions."""

    def __init__(self, context):
        super().__init__()
        size, moe = context.tp_size, context.moe_tp_size
        self.embed, self.qkv_proj, self.gate_up_proj = nn.Module(), nn.Module(), nn.Module()
        self.o_proj, self.experts = nn.Module(), nn.Module()

        def add(module, name, loader, *shape, dtype=torch.float32, **marks):
            param = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
            for key, value in {"weight_loader": loader, **marks}.items():
                setattr(param, key, value)
            module.register_parameter(name, param)

        rows = 8 * 4 // size + 2 * 4 * max(1, 2 // size)
        qkv, gate_up = QKVLoader(8, 2, 4), MergedColumnLoader((16, 16))
        add(self.embed, "weight", VocabLoader(19, 8), 24 // size, 6)
        add(self.qkv_proj, "weight", qkv, rows, 6)
        add(self.qkv_proj, "weight_scale", qkv, rows // 4, 2, block_shape=(4, 3))
        add(self.qkv_proj, "input_scale", qkv, 3)
        add(self.gate_up_proj, "weight", gate_up, 32 // size, 6)
        add(self.o_proj, "weight", sharded_weight_loader(1), 6, 32 // size, dtype=torch.bfloat16)
        experts = ExpertLoader(4, intermediate_size=12)
        room = -(-12 // moe) + 2
        add(self.experts, "w13_weight", experts, 4 // context.ep_size, 2 * room, 6)
        add(self.experts, "w2_weight", experts, 4 // context.ep_size, 6, room)
        self.norm = nn.Parameter(torch.zeros(6))


ARGUMENTS = {
    "stacked": [("qkv_proj", f"{letter}_proj", letter) for letter in "qkv"]
    + [("gate_up_proj", "gate_proj", 0), ("gate_up_proj", "up_proj", 1)],
    "expert_mapping": make_expert_params_mapping("gate", "down", "up", 4),
}


def layer_tensors():
    shapes = {"embed.weight": (19, 6), "o_proj.weight": (6, 32), "norm": (6,)}
    for letter, rows in (("q", 32), ("k", 8), ("v", 8)):
        shapes[f"{letter}_proj.weight"] = (rows, 6)
        shapes[f"{letter}_proj.weight_scale"] = (rows // 4, 2)
        shapes[f"{letter}_proj.input_scale"] = ()
    shapes |= {"gate_proj.weight": (16, 6), "up_proj.weight": (16, 6)}
    for expert in range(4):
        shapes |= {f"experts.{expert}.{name}.weight": (12, 6) for name in ("gate", "up")}
        shapes[f"experts.{expert}.down.weight"] = (6, 12)
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    tensors["o_proj.weight"] = tensors["o_proj.weight"].bfloat16()
    return tensors


LAYOUTS = [{}, {"tp_size": 2}, {"tp_size": 4}, {"tp_size": 4, "ep_size": 2}, {"tp_size": 2, "dp_size": 2}]


def contexts(layout):
    size = layout.get("tp_size", 1) * layout.get("dp_size", 1)
    return [ParallelContext.of_rank(rank, **layout) for rank in range(size)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_back_through_all_loaders(tmp_path, layout):
    """The very checkpoint that was loaded: whole names and shapes, no padding; then on other ranks."""
    tensors = layer_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    for context in contexts(layout):
        model = Layer(context)
        raywl.load_into(model, tmp_path, parallel=context, strict="exact", **ARGUMENTS)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
        raywl.save_sharded(model, tmp_path / "out", parallel=context)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor * 2), name
    for context in contexts({"tp_size": 2, "ep_size": 2}):
        raywl.load_into(Layer(context), tmp_path / "out", parallel=context, strict="exact", **ARGUMENTS)


def test_what_was_converted_is_saved_as_the_model_has_it(tmp_path):
    """Half of the bytes in the checkpoint, all of them in the model."""
    tensor = torch.randn(6, 4).bfloat16()
    save_file({"w": tensor, "one": torch.tensor([3.0])}, tmp_path / "model.safetensors")
    for rank in range(2):
        model = model_of(w=torch.zeros(6, 2), one=torch.zeros(()))
        raywl.load_into(model, tmp_path, parallel=tp(rank, 2), shards={"w": Shard(1)})
        raywl.save_sharded(model, tmp_path / "out", parallel=tp(rank, 2))
    found = saved_in(tmp_path / "out")
    assert found["w"].dtype == torch.float32
    assert torch.equal(found["w"], tensor.float())
    assert found["one"].tolist() == [3.0]


def test_codes_that_were_copied_as_bits_keep_their_name(tmp_path):
    raw = torch.arange(64, dtype=torch.uint8).view(4, 16)
    save_file({"w": raw.clone().view(torch.float8_e8m0fnu), "v": raw}, tmp_path / "model.safetensors")
    model = model_of(
        w=torch.zeros(4, 16, dtype=torch.uint8),
        v=torch.zeros(4, 16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    )
    raywl.load_into(model, tmp_path)
    raywl.save_sharded(model, tmp_path / "out")
    found = saved_in(tmp_path / "out")
    assert found["w"].dtype == torch.float8_e8m0fnu
    assert found["v"].dtype == torch.uint8
    assert bits(found["w"]) == bits(found["v"]) == bits(raw)


@pytest.mark.parametrize("how", ["exp", "own", "plain"])
def test_what_a_loader_computed_is_no_tensor_of_the_checkpoint(tmp_path, how):
    """Loaded again it would be computed twice."""
    loader = {
        "exp": composed_weight_loader(default_weight_loader, torch.exp),
        "own": lambda param, weight: param.data.copy_(weight + 1),
        "plain": lambda param, weight: (param.data.copy_(weight), param.data[1].add_(1)),
    }[how]
    save_file({"w": torch.zeros(3)}, tmp_path / "model.safetensors")
    model = model_of(w=torch.zeros(3))
    model.w.weight_loader = loader
    raywl.load_into(model, tmp_path)
    with pytest.raises(ValueError, match="w holds what its loader computed"):
        raywl.save_sharded(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    raywl.save_sharded(model, tmp_path / "out", shards={})
    assert torch.equal(saved_in(tmp_path / "out")["w"], model.w)


def test_padding_and_values_set_before_are_no_computation(tmp_path):
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    model = model_of(w=torch.zeros(5))

    def load(param, weight):
        param.data.fill_(9)
        param.data[3:].zero_()
        param.data[:3].copy_(weight)
        param.data[4:].zero_()

    model.w.weight_loader = load
    raywl.load_into(model, tmp_path)
    raywl.save_sharded(model, tmp_path / "out")
    assert torch.equal(saved_in(tmp_path / "out")["w"], torch.ones(3))


def test_parameters_that_were_replaced_since(tmp_path):
    """Another shape, dtype or order of elements: the record of the load doesn't speak of it."""
    save_file({"w": torch.arange(6.0).view(2, 3)}, tmp_path / "model.safetensors")
    for new in (torch.zeros(2, 3).half(), torch.zeros(3, 2), torch.zeros(3, 2).t()):
        model = model_of(w=torch.zeros(2, 3))
        raywl.load_into(model, tmp_path)
        model.w.data = new
        with pytest.raises(ValueError, match=r"w is .* but was loaded as float32"):
            raywl.save_sharded(model, tmp_path / "out")
    model.w.data = torch.ones(2, 3)
    raywl.save_sharded(model, tmp_path / "out")
    assert saved_in(tmp_path / "out")["w"].eq(1).all()


def test_keys_that_are_values_must_stay_equal(tmp_path):
    save_file({"q_proj": torch.ones(4, 2), "k_proj": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    model = model_of(qkv_proj=torch.zeros(8, 2))
    model.qkv_proj.weight_loader = QKVLoader(2, 1, 2)
    stacked = [("qkv_proj", "q_proj", "q"), ("qkv_proj", "k_proj", "k"), ("qkv_proj", "k_proj", "v")]
    raywl.load_into(model, tmp_path, stacked=stacked)
    raywl.save_sharded(model, tmp_path / "out")
    assert saved_in(tmp_path / "out").keys() == {"q_proj", "k_proj"}
    model.qkv_proj.data[-1] = 2
    with pytest.raises(CheckpointError, match=r"k_proj.*hold different values for the same part"):
        raywl.save_sharded(model, tmp_path / "other")
    assert not os.listdir(tmp_path / "other")


def test_ranks_that_differ_where_they_should_not(tmp_path):
    """A parameter that nobody said is cut: neither rank's is taken for the whole. The parts stay."""
    for rank in range(2):
        arguments = {"parallel": tp(rank, 2)}
        model = model_of(w=torch.full((4,), float(rank)))
        if rank == 0:
            raywl.save_sharded(model, tmp_path / "out", **arguments)
        else:
            with pytest.raises(CheckpointError, match=r"w.*rank 0 and rank 1 hold different .*shards="):
                raywl.save_sharded(model, tmp_path / "out", **arguments)
    assert os.listdir(tmp_path / "out") == [UNFINISHED]
    assert len(os.listdir(tmp_path / "out" / UNFINISHED)) == 2
    with pytest.raises(RaywlError):
        raywl.open_checkpoint(tmp_path / "out")


@pytest.mark.parametrize(
    ("shapes", "specs", "told"),
    [
        (((4, 2), (3, 2)), Shard(0), r"w.*is F32 \[6, 2\] by rank 1, but F32 \[8, 2\] by others"),
        (((4, 2), (4, 3)), Shard(0), "by rank 1, but"),
    ],
)
def test_parts_that_do_not_fit_together(tmp_path, shapes, specs, told):
    raywl.save_sharded(
        model_of(w=torch.zeros(shapes[0])), tmp_path / "out", parallel=tp(0, 2), shards={"w": specs}
    )
    with pytest.raises(CheckpointError, match=told):
        raywl.save_sharded(
            model_of(w=torch.zeros(shapes[1])), tmp_path / "out", parallel=tp(1, 2), shards={"w": specs}
        )


def test_a_tensor_that_nobody_has_all_of(tmp_path):
    """A rank loaded only a part, and no other has the rest."""
    save_file({"w": torch.ones(6)}, tmp_path / "model.safetensors")
    model = model_of(w=torch.zeros(2))
    model.w.weight_loader = lambda param, weight: param.data.copy_(weight[:2])
    raywl.load_into(model, tmp_path)
    with pytest.raises(CheckpointError, match=r"w.*the ranks hold 8 of its 24 bytes"):
        raywl.save_sharded(model, tmp_path / "out")
    assert not os.listdir(tmp_path / "out")


def test_a_folder_is_for_one_save(tmp_path):
    model = model_of(w=torch.ones(2))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is no folder"):
        raywl.save_sharded(model, tmp_path / "file")
    with pytest.raises(ValueError, match=r"isn't empty \(file\)"):
        raywl.save_sharded(model, tmp_path)
    raywl.save_sharded(model, tmp_path / "out", parallel=tp(0, 2))
    with pytest.raises(ValueError, match=r"rank-00000-of-00002.*a save that didn't end"):
        raywl.save_sharded(model, tmp_path / "out", parallel=tp(0, 2))
    with pytest.raises(ValueError, match=r"isn't empty"):
        raywl.save_sharded(model, tmp_path / "out")
    raywl.save_sharded(model, tmp_path / "out", parallel=tp(1, 2))
    for context in (tp(0, 2), ParallelContext()):
        with pytest.raises(ValueError, match=r"isn't empty \(model\.safetensors\)"):
            raywl.save_sharded(model, tmp_path / "out", parallel=context)
    with pytest.raises(ValueError, match="max_file_bytes"):
        raywl.save_sharded(model, tmp_path / "new", max_file_bytes=0)
    with pytest.raises(ValueError, match="w is on meta"):
        raywl.save_sharded(model_of(w=torch.ones(2, device="meta")), tmp_path / "new")


def test_parts_of_different_saves_are_not_mixed(tmp_path):
    """Ranks of a process group agree on what save it is."""
    raywl.save_sharded(model_of(w=torch.ones(2)), tmp_path / "out", parallel=tp(0, 2))
    write_part(
        str(tmp_path / "out" / UNFINISHED / "rank-00001-of-00003.safetensors"), tp(1, 3), "other", {}, []
    )
    raywl.save_sharded(model_of(w=torch.ones(2)), tmp_path / "out2", parallel=tp(0, 3))
    raywl.save_sharded(model_of(w=torch.ones(2)), tmp_path / "out2", parallel=tp(2, 3))
    shutil.copy(
        tmp_path / "out" / UNFINISHED / "rank-00001-of-00003.safetensors", tmp_path / "out2" / UNFINISHED
    )
    with pytest.raises(CheckpointError, match="parts of different saves"):
        save._finish(
            str(tmp_path / "out2"),
            str(tmp_path / "out2" / UNFINISHED),
            [f"rank-{rank:05}-of-00003.safetensors" for rank in range(3)],
            100,
        )


@pytest.mark.parametrize("damage", ["cut", "foreign"])
def test_a_damaged_part(tmp_path, damage):
    raywl.save_sharded(model_of(w=torch.ones(2)), tmp_path / "out", parallel=tp(0, 2))
    part = tmp_path / "out" / UNFINISHED / "rank-00000-of-00002.safetensors"
    if damage == "cut":
        part.write_bytes(part.read_bytes()[:-1])
    else:
        save_file({"w": torch.ones(2)}, part)
    with pytest.raises(CheckpointError, match="rank-00000-of-00002"):
        raywl.save_sharded(model_of(w=torch.ones(2)), tmp_path / "out", parallel=tp(1, 2))
    assert len(os.listdir(tmp_path / "out" / UNFINISHED)) == 2


def test_a_full_disk(tmp_path, monkeypatch):
    """Said before anything is written."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=7))
    with pytest.raises(CapacityError, match="8 bytes needed, 7 bytes available"):
        raywl.save_sharded(model_of(w=torch.ones(2)), tmp_path / "out")


def test_an_interruption_leaves_no_checkpoint(tmp_path, monkeypatch):
    """Of several files: none of them is left, nor an index, and a second try works."""
    model, write = model_of(a=torch.ones(2), b=torch.ones(2)), save.write_whole
    calls = []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return write(*args)

    monkeypatch.setattr(save, "write_whole", interrupted)
    with pytest.raises(KeyboardInterrupt):
        raywl.save_sharded(model, tmp_path / "out", max_file_bytes=1)
    assert os.listdir(tmp_path / "out") == []
    monkeypatch.setattr(save, "write_whole", write)
    report = raywl.save_sharded(model, tmp_path / "out", max_file_bytes=1)
    assert list(report.files) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 16}
    assert sorted(index["weight_map"]) == ["a", "b"]


def test_ranks_that_finish_together(tmp_path):
    """One of them puts the parts together, whoever is last."""
    size = 8
    for attempt in range(5):
        start, reports = threading.Barrier(size), [None] * size

        def run(rank, folder, start=start, reports=reports):
            context = tp(rank, size)
            model = model_of(w=torch.full((2,), float(rank)))
            start.wait(30)
            reports[rank] = raywl.save_sharded(model, folder, parallel=context, shards={"w": Shard(0)})

        threads = [threading.Thread(target=run, args=(rank, tmp_path / str(attempt))) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sum(bool(report.files) for report in reports) == 1
        assert saved_in(tmp_path / str(attempt))["w"].tolist() == [r // 2 for r in range(2 * size)]


def test_large_parameters_are_written_in_bounded_memory(tmp_path, monkeypatch):
    """Strided ones too, a chunk at a time."""
    from raywl.saving import files

    monkeypatch.setattr(files, "_CHUNK_BYTES", 64)
    tensor = torch.randn(9, 7, 5)
    for rank in range(2):
        model = model_of(w=tensor.transpose(0, 2).contiguous().transpose(0, 2))
        raywl.save_sharded(model, tmp_path / "out", parallel=tp(rank, 2))
    assert torch.equal(saved_in(tmp_path / "out")["w"], tensor)
    assert max(len(chunk) for chunk in files._chunks(tensor)) <= 64
