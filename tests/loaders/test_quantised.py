"""Loaders of dense parameters and the companions of quantised weights: whole blocks, or an error."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import raywl
from raywl import ParallelContext
from raywl.errors import CheckpointError, ShapeMismatchError
from raywl.loaders import (
    MergedColumnLoader,
    QKVLoader,
    VocabLoader,
    default_weight_loader,
    sharded_weight_loader,
)
from raywl.loaders.layout import layout_of
from raywl.readers import OpenFiles

from .companions import KIND_NAMES, UNSET, kinds, numbered

COLUMNS = 12
UNITS = [1, 2, 3, 4, 8]


def tp(rank, size):
    return ParallelContext(tp_rank=rank, tp_size=size)


def is_border(edge, unit, whole):
    return edge % unit == 0 or edge == whole


def kind_of(name, unit):
    return next(kind for kind in kinds(unit) if kind.name == name)


@settings(deadline=None, max_examples=150)
@given(
    kind_name=st.sampled_from(KIND_NAMES),
    unit=st.sampled_from(UNITS),
    size=st.sampled_from([1, 2, 4, 8]),
    kv_heads=st.sampled_from([1, 2, 4]),
    groups=st.sampled_from([1, 2, 8]),
    head_dim=st.integers(1, 8),
    fused=st.booleans(),
)
def test_law_qkv(kind_name, unit, size, kv_heads, groups, head_dim, fused):
    """Each row's companion is on the ranks that have the row; refused only where that can't be."""
    kind = kind_of(kind_name, unit)
    heads = max(kv_heads * groups, size)
    whole = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    local = [heads * head_dim // size, *[max(1, kv_heads // size) * head_dim] * 2]
    copies = max(1, size // kv_heads)
    parts = [[rank, rank // copies, rank // copies] for rank in range(size)]
    check_parts(kind, QKVLoader(heads, kv_heads, head_dim), whole, local, parts, "qkv", fused)


@settings(deadline=None, max_examples=150)
@given(
    kind_name=st.sampled_from(KIND_NAMES),
    unit=st.sampled_from(UNITS),
    size=st.integers(1, 4),
    local=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    fused=st.booleans(),
)
def test_law_merged_columns(kind_name, unit, size, local, fused):
    whole = [rows * size for rows in local]
    parts = [[rank] * len(local) for rank in range(size)]
    shard_ids = range(len(local))
    check_parts(kind_of(kind_name, unit), MergedColumnLoader(whole), whole, local, parts, shard_ids, fused)


def refusal(loader, param, calls):
    """What a loader says that refuses one of its calls for a cut; `None` if it takes them all."""
    try:
        for args in calls:
            loader(param, *args)
    except ShapeMismatchError:
        raise
    except ValueError as error:
        return str(error)
    return None


def check_parts(kind, loader, whole, local, parts, shard_ids, fused):
    """Loads all ranks and puts their parts together again.

    Args:
        whole: Rows of each weight.
        local: Rows of each on a rank.
        parts: For each rank, which part of each weight it has.
    """
    unit, dim = kind.outputs, kind.output_dim
    if fused:
        tensors = [numbered(*kind.shape(sum(whole), COLUMNS))]
        rows = list(kind.expanded(tensors[0], dim, unit, sum(whole)).split(whole, dim))
        calls = [(tensors[0], None)]
    else:
        tensors = [numbered(*kind.shape(size, COLUMNS)) + 1000 * i for i, size in enumerate(whole)]
        rows = [kind.expanded(t, dim, unit, size) for t, size in zip(tensors, whole, strict=True)]
        calls = list(zip(tensors, shard_ids, strict=True))
    for rank, mine in enumerate(parts):
        param = kind.parameter(*kind.shape(sum(local), COLUMNS))
        with tp(rank, len(parts)):
            told = refusal(loader, param, calls)
        if told is not None:
            assert f"of {unit}" in told
            assert f"rank {rank} of {len(parts)}" in told
            assert must_be_refused(unit, whole, local, mine, fused)
            continue
        got = kind.expanded(param, dim, unit, sum(local)).split(local, dim)
        wanted = [
            row.narrow(dim, part * size, size) for row, part, size in zip(rows, mine, local, strict=True)
        ]
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        assert not (param == UNSET).any()


def must_be_refused(unit, whole, local, mine, fused):
    """Whether some part begins or ends inside a block, in its tensor or in the parameter."""
    if fused and whole == local:
        return False
    edges = []
    firsts = list(accumulate(whole, initial=0)) if fused else [0] * len(whole)
    for first, part, size, rows in zip(firsts[: len(whole)], mine, local, whole, strict=True):
        end = sum(whole) if fused else rows
        edges += [(first + part * size, end), (first + (part + 1) * size, end)]
    edges += [(place, None) for place in list(accumulate(local, initial=0))[:-1]]
    return not all(is_border(edge, unit, end) for edge, end in edges)


@settings(deadline=None, max_examples=150)
@given(
    kind_name=st.sampled_from(KIND_NAMES),
    unit=st.sampled_from(UNITS),
    size=st.sampled_from([1, 2, 4]),
    num_rows=st.integers(1, 70),
)
def test_law_vocabulary(kind_name, unit, size, num_rows):
    """Rows of padding have zeros; a block that ends in the padding is whole."""
    kind = kind_of(kind_name, unit)
    unit, loader = kind.outputs, VocabLoader(num_rows, 16)
    each = loader.num_padded // size
    tensor = numbered(*kind.shape(num_rows, COLUMNS)) + 1
    rows = kind.expanded(tensor, kind.output_dim, unit, num_rows)
    for rank in range(size):
        param = kind.parameter(*kind.shape(each, COLUMNS))
        start, end = min(rank * each, num_rows), min((rank + 1) * each, num_rows)
        with tp(rank, size):
            told = refusal(loader, param, [(tensor,)])
        if told is not None:
            assert f"of {unit}" in told
            assert not (is_border(start, unit, num_rows) and is_border(end, unit, num_rows))
            continue
        got = kind.expanded(param, kind.output_dim, unit, each)
        assert torch.equal(
            got.narrow(kind.output_dim, 0, end - start), rows.narrow(kind.output_dim, start, end - start)
        )
        whole_blocks = -(-(end - start) // unit) * unit
        assert not got.narrow(kind.output_dim, min(whole_blocks, each), max(0, each - whole_blocks)).any()


@settings(deadline=None, max_examples=100)
@given(
    unit=st.sampled_from(UNITS),
    size=st.integers(1, 5),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    kind_name=st.sampled_from(KIND_NAMES),
)
def test_law_merged_columns_padded_to_blocks(unit, size, sizes, kind_name):
    """C28: asked to pad, weight and companions are padded alike, and never refused."""
    kind = kind_of(kind_name, unit)
    unit = kind.outputs
    padded = [-(-rows // (size * unit)) * size * unit for rows in sizes]
    loader = MergedColumnLoader(sizes, padded_sizes=padded)
    local = [rows // size for rows in padded]
    tensors = [numbered(*kind.shape(rows, COLUMNS)) + 1 for rows in sizes]
    got = [[] for _ in sizes]
    for rank in range(size):
        param = kind.parameter(*kind.shape(sum(local), COLUMNS))
        with tp(rank, size):
            for index, tensor in enumerate(tensors):
                loader(param, tensor, index)
        rows = kind.expanded(param, kind.output_dim, unit, sum(local))
        for index, part in enumerate(rows.split(local, kind.output_dim)):
            got[index].append(part)
    for parts, tensor, rows in zip(got, tensors, sizes, strict=True):
        again = torch.cat(parts, kind.output_dim)
        wanted = kind.expanded(tensor, kind.output_dim, unit, rows)
        assert torch.equal(again.narrow(kind.output_dim, 0, rows), wanted)
        blocks = -(-rows // unit) * unit
        assert not again.narrow(kind.output_dim, blocks, again.shape[kind.output_dim] - blocks).any()


def test_scale_rows_that_do_not_divide():
    """C28: 24 scales for blocks of 4 rows, and 16 ranks of 6 rows: refused, on every rank."""
    loader = MergedColumnLoader((96,))
    scale = numbered(24, 2)
    for marks in ({"block_shape": (4, 4)}, {}):
        param = torch.nn.Parameter(torch.full((2, 2), UNSET), requires_grad=False)
        for name, value in marks.items():
            setattr(param, name, value)
        for rank in (0, 14, 15):
            with tp(rank, 16), pytest.raises(ValueError, match=rf"rank {rank} of 16 .*block of 4"):
                loader(param, scale, 0)
        assert (param == UNSET).all()
    padded = MergedColumnLoader((96,), padded_sizes=(128,))
    for rank in range(16):
        param = kinds(4)[2].parameter(2, 2)
        with tp(rank, 16):
            padded(param, scale, 0)
        assert torch.equal(param, scale[2 * rank : 2 * rank + 2] if rank < 12 else torch.zeros(2, 2))


@pytest.mark.parametrize(
    ("rows", "stored", "unit"),
    [
        (96, 24, 4),
        (94, 24, 4),
        (256, 2, 128),
        (200, 2, 128),
        (64, 1, 64),
        (96, 96, 1),
        (96, 0, 1),
        (96, 97, 1),
        (90, 30, 3),
        (1000, 3, 1),
    ],
)
def test_blocks_that_are_plain_from_the_shape(rows, stored, unit):
    """Unmarked companions: `ceil(rows / block)` elements leave one block size, or one power of two."""
    along = layout_of(torch.empty(4, 4)).output.inferred(rows, stored)
    assert along.unit == unit
    assert unit == 1 or -(-rows // unit) == stored


@pytest.mark.parametrize("loader_and_shape", ["qkv", "merged", "vocabulary"])
def test_unmarked_block_scales(loader_and_shape):
    """As vLLM's own block scales, which don't say how large their blocks are."""
    scale = numbered(8, 3)
    param = torch.nn.Parameter(torch.full((4, 3), UNSET), requires_grad=False)
    with tp(1, 2):
        if loader_and_shape == "qkv":
            QKVLoader(8, 4, 64)(param, scale, None)  # 512 + 256 + 256 rows in blocks of 128
            wanted = scale[[2, 3, 5, 7]]
        elif loader_and_shape == "merged":
            MergedColumnLoader((512, 512))(param, scale)
            wanted = scale[[2, 3, 6, 7]]
        else:
            VocabLoader(1000, 1024)(param, scale)
            wanted = scale[4:]
    assert torch.equal(param, wanted)


def test_a_key_head_that_is_half_a_block_is_refused():
    """Two heads of 64 rows share a block of 128: the ranks that have one each would need half a scale."""
    with tp(3, 4), pytest.raises(ValueError, match=r"rank 3 of 4 keeps rows 64 to 128 .*block of 128"):
        QKVLoader(8, 2, 64)(kinds(128)[2].parameter(2, 1), numbered(1, 1), "k")


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_scales_of_whole_tensors(size, shape):
    """One for each of q, k and v, marked or not; the ranks all have them."""
    for marks in ({}, {"per_tensor": True}, {"quant_method": "tensor"}, {"needs_scalar_to_array": True}):
        param = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        for name, value in marks.items():
            setattr(param, name, value)
        with tp(size - 1, size):
            for number, shard_id in enumerate("vqk"):
                QKVLoader(8, 2, 16)(param, torch.full(shape, float(number + 1)), shard_id)
        assert param.tolist() == [2, 3, 1]
    both = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    with tp(size - 1, size):
        for index in (1, 0):
            MergedColumnLoader((64, 64))(both, torch.full(shape, index + 5.0), index)
    assert both.tolist() == [5, 6]


def test_one_scale_has_no_room_for_three():
    """The last one would be taken for all."""
    for shape in ((), (1,), (1, 1)):
        param = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
        with pytest.raises(ShapeMismatchError):
            QKVLoader(8, 2, 16)(param, torch.ones(1), "k")
        assert not param.any()


def test_one_scale_of_a_fused_weight():
    """One element into one element, and into each of three only where the parameter says what they are."""
    for shape in ((), (1,)):
        one = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
        QKVLoader(8, 2, 16)(one, torch.full(shape, 7.0))
        assert one.tolist() == [7]
        three = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        with pytest.raises(ShapeMismatchError):
            QKVLoader(8, 2, 16)(three, torch.full(shape, 7.0))
        three.per_tensor = True
        QKVLoader(8, 2, 16)(three, torch.full(shape, 7.0))
        assert three.tolist() == [7, 7, 7]
        VocabLoader(10, 16)(one, torch.full(shape, 8.0))
        assert one.tolist() == [8]
    QKVLoader(8, 2, 16)(three, torch.tensor([1.0, 2.0, 3.0]))
    assert three.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("param", "weight"), [((4, 3), (4, 1)), ((4, 3), (1,)), ((3, 1), (1,)), ((0,), (1,))]
)
def test_no_companion_is_broadcast(param, weight):
    """C31: nor does a parameter of no size take an element."""
    target = torch.nn.Parameter(torch.full(param, UNSET), requires_grad=False)
    for load in (MergedColumnLoader((4,)), VocabLoader(4, 4), sharded_weight_loader(0)):
        with pytest.raises(ShapeMismatchError):
            load(target, torch.ones(weight, dtype=torch.int64))
    assert (target == UNSET).all()


def test_group_indices_are_one_for_all_or_each_its_own():
    """`g_idx`, marked as running along the inputs alone. Of q's, k's and v's, the first counts."""
    tensors = {shard_id: numbered(6) + 10 * i for i, shard_id in enumerate("qkv")}
    one = torch.nn.Parameter(torch.full((6,), UNSET, dtype=torch.int32), requires_grad=False)
    one.input_dim = 0
    each = torch.nn.Parameter(torch.full((3, 6), UNSET, dtype=torch.int32), requires_grad=False)
    each.output_dim, each.input_dim = None, 1
    for param in (one, each):
        with tp(1, 2):
            for shard_id in "kvq":
                QKVLoader(4, 2, 2)(param, tensors[shard_id], shard_id)
    assert torch.equal(one, tensors["q"])
    assert torch.equal(each, torch.stack(list(tensors.values())))
    with tp(1, 2), pytest.raises(ShapeMismatchError):
        QKVLoader(4, 2, 2)(one, numbered(5), "v")


def test_values_of_3_bits_cross_words():
    """32 values in three int32: only multiples of 32 can be cut."""
    packed = numbered(12, 4)  # 128 outputs
    marks = {"packed_dim": 0, "packed_factor": Fraction(32, 3)}

    def load(rank, size, rows):
        param = torch.nn.Parameter(torch.full((rows, 4), UNSET, dtype=torch.int32), requires_grad=False)
        for name, value in marks.items():
            setattr(param, name, value)
        with tp(rank, size):
            MergedColumnLoader((128,))(param, packed, 0)
        return param

    assert torch.equal(torch.cat([load(rank, 4, 3) for rank in range(4)]), packed)
    with pytest.raises(ValueError, match="packed word of 32"):
        load(1, 8, 2)


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ({"output_dim": 1, "input_dim": 1}, "both 1"),
        ({"output_dim": 2}, "output_dim 2 is no dim of a parameter that has 2"),
        ({"input_dim": 0.5}, "input_dim must be a whole number"),
        ({"packed_dim": 0}, "needs a packed_factor"),
        ({"packed_dim": 0, "packed_factor": 0}, "at least 1, got 0"),
        ({"packed_dim": 0, "packed_factor": 2.0}, "at least 1, got 2.0"),
        ({"block_shape": 128}, r"must be \(outputs, inputs\), got 128"),
        ({"block_shape": (128, 0)}, "at least 1"),
        ({"group_size": 0}, "at least 1, or -1"),
        ({"group_size": -2}, "at least 1, or -1"),
    ],
)
def test_attributes_that_say_nothing_sensible(marks, message):
    param = torch.empty(4, 4)
    for name, value in marks.items():
        setattr(param, name, value)
    with pytest.raises(ValueError, match=message):
        layout_of(param)


@pytest.mark.parametrize(
    ("marks", "output_dim", "input_dim"),
    [
        ({}, 0, 1),
        ({"output_dim": 0}, 0, 1),
        ({"output_dim": -1}, 1, 0),
        ({"input_dim": 0}, 1, 0),
        ({"is_transposed": True}, 1, 0),
        ({"output_dim": None}, None, None),
        ({"output_dim": None, "input_dim": 0}, None, 0),
        ({"load_full_w2": True}, 0, None),
    ],
)
def test_which_dim_is_which(marks, output_dim, input_dim):
    param = torch.empty(4, 4)
    for name, value in marks.items():
        setattr(param, name, value)
    layout = layout_of(param)
    assert (layout.output and layout.output.dim) == output_dim
    assert (layout.input and layout.input.dim) == input_dim


def test_a_packed_weight_is_cut_between_groups_too():
    """Its own words would allow a cut that its scales don't."""
    param = kinds(8)[8].parameter(4, 2)  # inputs packed by 8
    param.group_size = 32
    with tp(0, 4), pytest.raises(ValueError, match=r"groups of 32,.*rank 0 of 4"):
        sharded_weight_loader(1)(param, numbered(4, 8))  # 64 inputs, 16 each
    with tp(1, 2):
        param = kinds(8)[8].parameter(4, 4)
        param.group_size = 32
        sharded_weight_loader(1)(param, numbered(4, 8))
    assert torch.equal(param, numbered(4, 8)[:, 4:])


def test_groups_that_do_not_divide_are_refused_by_the_plain_loader():
    """Row-parallel layers: a group scale of 6 groups for 4 ranks."""
    param = kinds(128)[4].parameter(8, 2)
    with tp(3, 4), pytest.raises(ValueError, match=r"6 elements .*768 rows in groups of 128,.*rank 3 of 4"):
        sharded_weight_loader(1)(param, numbered(8, 6))


# Through files


class Layer(torch.nn.Module):
    """A quantised qkv projection, with what awq, gptq or fp8 have beside it."""

    def __init__(self, loader, parameters):
        super().__init__()
        self.qkv_proj = torch.nn.Module()
        for name, param in parameters.items():
            param.weight_loader = loader
            self.qkv_proj.register_parameter(name, param)


STACKED = [("qkv_proj", f"{letter}_proj", letter) for letter in "qkv"]


@settings(deadline=None, max_examples=40)
@given(
    kind_names=st.lists(st.sampled_from(KIND_NAMES), min_size=1, max_size=4, unique=True),
    unit=st.sampled_from([1, 2, 4]),
    size=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([2, 4, 8]),
)
def test_law_lazy_and_eager_agree_and_read_what_they_keep(tmp_path_factory, kind_names, unit, size, head_dim):
    """All of a layer at once: the same values, the bytes that are kept; or nothing read at all."""
    heads, kv_heads = 8, 2
    loader = QKVLoader(heads, kv_heads, head_dim)
    whole = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    local = heads * head_dim // size + 2 * max(1, kv_heads // size) * head_dim
    all_kinds = {name.replace(" ", "_"): kind_of(name, unit) for name in kind_names}
    tensors = {
        f"{letter}_proj.{name}": numbered(*kind.shape(rows, COLUMNS)) + 100 * ord(letter)
        for name, kind in all_kinds.items()
        for letter, rows in whole.items()
    }
    folder = tmp_path_factory.mktemp("layer")
    save_file(tensors, folder / "model.safetensors")
    with tp(size - 1, size) as context:
        lazy, eager = (
            Layer(loader, {n: k.parameter(*k.shape(local, COLUMNS)) for n, k in all_kinds.items()})
            for _ in range(2)
        )
        reads = []
        with pytest.MonkeyPatch.context() as patch:
            read = OpenFiles.read_into
            patch.setattr(OpenFiles, "read_into", lambda *args: (reads.append(args), read(*args))[1])
            try:
                report = raywl.load_into(lazy, folder, parallel=context, stacked=STACKED)
            except ValueError:
                report = None
        if report is None:
            assert not reads
            assert all((param == UNSET).all() for param in lazy.parameters())
            assert any(is_cut(kind, head_dim, heads // size) for kind in all_kinds.values())
            return
        for name, tensor in tensors.items():
            letter, _, kind = name.partition("_proj.")
            loader(getattr(eager.qkv_proj, kind), tensor, letter)
    kept = 0
    for a, b in zip(lazy.parameters(), eager.parameters(), strict=True):
        assert torch.equal(a, b)
        kept += a.nbytes
    assert report.bytes_loaded == kept
    assert report.plan.nbytes_kept == kept
    assert not report.skipped


def is_cut(kind, head_dim, num_q):
    """Whether blocks are larger than a head, or not a part of one."""
    return head_dim % kind.outputs != 0 or num_q * head_dim % kind.outputs != 0


def test_one_refused_companion_stops_the_load_before_anything_is_read(tmp_path):
    """Weights that fit come first in the file, and stay as they were."""
    weight, scale = numbered(64, 4), numbered(4, 1)
    save_file({"a.weight": weight, "b.weight_scale": scale}, tmp_path / "model.safetensors")
    model = torch.nn.Module()
    model.a, model.b = torch.nn.Module(), torch.nn.Module()
    model.a.weight, model.b.weight_scale = kinds(1)[0].parameter(8, 4), kinds(16)[2].parameter(1, 1)
    for param in model.parameters():
        param.weight_loader = MergedColumnLoader((64,))
    with pytest.raises(
        ValueError, match=r"b\.weight_scale: rank 1 of 8 keeps rows 8 to 16 of 64.*block of 16"
    ):
        raywl.load_into(model, tmp_path, parallel=tp(1, 8))
    assert all((param == UNSET).all() for param in model.parameters())


def test_keys_that_are_values_too(tmp_path):
    """C33: with V = K there is no v_proj; all companions of k_proj go to both, not its weight alone."""
    names = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    shapes = {"q": ((32, 4), (2, 1), (1,), ()), "k": ((16, 4), (1, 1), (1,), ())}
    tensors = {
        f"{letter}_proj.{name}": torch.rand(shape)
        for letter in "qk"
        for name, shape in zip(names, shapes[letter], strict=True)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    shapes = {"weight": (64, 4), "weight_scale": (4, 1), "weight_scale_2": (3,), "input_scale": (3,)}
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    parameters["weight_scale"].block_shape = (16, 4)
    model = Layer(QKVLoader(8, 4, 4), parameters)
    stacked = [("qkv_proj", "q_proj", "q"), ("qkv_proj", "k_proj", "k"), ("qkv_proj", "k_proj", "v")]
    report = raywl.load_into(model, tmp_path, stacked=stacked, strict="exact")
    assert sorted(report.loaded) == sorted(tensors)
    for name in names:
        param = getattr(model.qkv_proj, name).detach()
        q, k, v = param.split(
            (32, 16, 16) if name == "weight" else (2, 1, 1) if name == "weight_scale" else 1
        )
        assert torch.equal(q.reshape(-1), tensors[f"q_proj.{name}"].reshape(-1))
        for part in (k, v):
            assert torch.equal(part.reshape(-1), tensors[f"k_proj.{name}"].reshape(-1))


@pytest.mark.parametrize("has_loader", [True, False])
@pytest.mark.parametrize("rows", [["v"], ["k", "v"]], ids="".join)
def test_keys_that_are_values_too_in_projections_of_their_own(rows, has_loader, tmp_path):
    """C33: likewise where k_proj and v_proj are apart; a v_proj that there is after all is refused."""
    shapes = {"weight": (16, 4), "weight_scale": (1, 1), "weight_scale_2": (1,), "input_scale": ()}
    tensors = {f"k_proj.{name}": torch.rand(shape) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    model = torch.nn.Module()
    for letter in "kv":
        model.register_module(f"{letter}_proj", part := torch.nn.Module())
        for name, shape in shapes.items():
            part.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
            if has_loader:
                getattr(part, name).weight_loader = default_weight_loader
    stacked = [(f"{letter}_proj", "k_proj", None) for letter in rows]
    report = raywl.load_into(model, tmp_path, stacked=stacked, strict="exact")
    assert sorted(report.loaded) == sorted(tensors)
    for name in shapes:
        for part in (model.k_proj, model.v_proj):
            assert torch.equal(getattr(part, name), tensors[f"k_proj.{name}"])
    save_file({**tensors, "v_proj.weight": torch.rand(16, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"v_proj\.weight.*k_proj\.weight"):
        raywl.load_into(model, tmp_path, stacked=stacked)
