"""What configs say of tensors is enough to cut them: parts are what quantising the part would have given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raywl import ParallelContext
from raywl.loaders.layout import layout_of
from raywl.parameters import set_weight_attrs
from raywl.quant import (
    AWQConfig,
    BitsAndBytesConfig,
    CompressedTensorsConfig,
    Fp8Config,
    GPTQConfig,
    ModelOptConfig,
    Mxfp4Config,
    TensorLayout,
)
from raywl.weight_utils import MergedColumnLoader
from tests.quant.test_configs import GPTQ, NVFP4, W4, compressed

GROUP = 32


def words(values: torch.Tensor, bits: int, dim: int, order: list[int] | None = None) -> torch.Tensor:
    """Values of `bits` bits as 32-bit words along a dim, the first one lowest; whole words only.

    An independent reference: the bits of each run, one after the other.
    """
    values = values.movedim(dim, -1)
    if order is not None:
        values = values.unflatten(-1, (-1, len(order)))[..., order].flatten(-2)
    stream = (values.unsqueeze(-1) >> torch.arange(bits)) & 1
    stream = stream.flatten(-2).unflatten(-1, (-1, 32))
    packed = (stream.long() << torch.arange(32)).sum(-1)
    return packed.movedim(-1, dim)


def first_of(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """One element for each block: a number that tells the block."""
    return matrix[::rows, ::columns]


@dataclass
class Case:
    """A method, and how it makes its tensors out of a matrix of numbers."""

    layouts: dict[str, TensorLayout]
    make: dict[str, Callable[[torch.Tensor], torch.Tensor]]
    row_step: int = 1
    column_step: int = 1


def _gptq(bits: int) -> Case:
    config = GPTQConfig.from_config({**GPTQ, "bits": bits, "group_size": GROUP})
    low = 2**bits - 1
    return Case(
        config.layouts(),
        {
            "qweight": lambda m: words(m & low, bits, 0),
            "qzeros": lambda m: words(first_of(m, GROUP, 1) & low, bits, 1),
            "scales": lambda m: first_of(m, GROUP, 1),
            "g_idx": lambda m: m[:, 0],
        },
        row_step=32,
        column_step=GROUP,
    )


_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
_CT = CompressedTensorsConfig.from_config(compressed({**W4, "group_size": GROUP, "symmetric": False}))
CASES = {
    "gptq 4": _gptq(4),
    "gptq 8": _gptq(8),
    "gptq 3": _gptq(3),
    "awq": Case(
        AWQConfig(group_size=GROUP).layouts(),
        {
            "qweight": lambda m: words(m & 15, 4, 1, _AWQ_ORDER),
            "qzeros": lambda m: words(first_of(m, GROUP, 1) & 15, 4, 1, _AWQ_ORDER),
            "scales": lambda m: first_of(m, GROUP, 1),
        },
        row_step=8,
        column_step=GROUP,
    ),
    "compressed-tensors": Case(
        _CT.layouts(),
        {
            "weight_packed": lambda m: words(m & 15, 4, 1),
            "weight_scale": lambda m: first_of(m, 1, GROUP),
            "weight_zero_point": lambda m: words(first_of(m, 1, GROUP) & 15, 4, 0),
        },
        row_step=8,
        column_step=GROUP,
    ),
    "channels": Case(
        CompressedTensorsConfig.from_config(
            compressed({"num_bits": 8, "strategy": "channel"}, form="int-quantized")
        ).layouts(),
        {"weight": lambda m: m, "weight_scale": lambda m: first_of(m, 1, 1 << 20)},
    ),
    "fp8 blocks": Case(
        Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=(16, GROUP)).layouts(),
        {"weight": lambda m: m, "weight_scale_inv": lambda m: first_of(m, 16, GROUP)},
        row_step=16,
        column_step=GROUP,
    ),
    "modelopt blocks": Case(
        ModelOptConfig.from_config({"quant_algo": "FP8_PB_WO"}).layouts(),
        {"weight": lambda m: m, "weight_scale": lambda m: first_of(m, 128, 128)[:, None, :, None]},
        row_step=128,
        column_step=128,
    ),
    "nvfp4": Case(
        ModelOptConfig.from_config(NVFP4).layouts(),
        {
            "weight": lambda m: (m[:, ::2] & 15) | ((m[:, 1::2] & 15) << 4),
            "weight_scale": lambda m: first_of(m, 1, 16),
            "weight_scale_2": lambda m: torch.tensor([7]),
        },
        column_step=16,
    ),
    "mxfp4": Case(
        Mxfp4Config().layouts(),
        {
            "blocks": lambda m: ((m[:, ::2] & 15) | ((m[:, 1::2] & 15) << 4)).unflatten(-1, (-1, 16)),
            "scales": lambda m: first_of(m, 1, 32),
        },
        column_step=32,
    ),
    "int8": Case(
        BitsAndBytesConfig.from_config({"load_in_8bit": True}).layouts(),
        {"weight": lambda m: m, "SCB": lambda m: m[:, 0]},
    ),
}


def cut(
    tensor: torch.Tensor, layout: TensorLayout, rows: tuple, columns: tuple, shape: tuple
) -> torch.Tensor:
    """A rank's part, going by nothing but the attributes that a parameter gets."""
    param = torch.nn.Parameter(tensor, requires_grad=False)
    set_weight_attrs(param, layout.attributes())
    found = layout_of(param)
    if found.per_tensor:
        return tensor
    for along, (start, end), whole in ((found.output, rows, shape[0]), (found.input, columns, shape[1])):
        if along is not None:
            first, last = along.span(start, end, whole, "the test")
            tensor = tensor.narrow(along.dim, first, last - first)
    return tensor


def matrix(rows: int, columns: int) -> torch.Tensor:
    return (torch.arange(rows * columns) * 2654435761 % 251).view(rows, columns)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_part_is_what_quantising_the_part_gives(name, data):
    """For every tensor that the config names, and every cut on its borders."""
    case = CASES[name]
    steps = case.row_step, case.column_step
    counts = [data.draw(st.integers(1, 4)) for _ in steps]
    spans = []
    for step, count in zip(steps, counts, strict=True):
        start = data.draw(st.integers(0, count - 1))
        spans.append((start * step, data.draw(st.integers(start + 1, count)) * step))
    shape = counts[0] * steps[0], counts[1] * steps[1]
    # The formats with inputs first are made of the transposed matrix.
    turned = case.layouts.get("qweight") is not None
    whole = matrix(*shape)
    part = whole[slice(*spans[0]), slice(*spans[1])]
    for tensor, make in case.make.items():
        layout = case.layouts[tensor]
        made = make(whole.T if turned else whole)
        # A tensor with nothing along a dim is the same for any part along it.
        narrowed = part
        if layout.input_dim is None:
            narrowed = whole[slice(*spans[0])]
        if layout.output_dim is None and not layout.per_tensor:
            narrowed = whole[:, slice(*spans[1])]
        expected = make(narrowed.T if turned else narrowed)
        assert torch.equal(cut(made, layout, *spans, shape), expected), tensor


@pytest.mark.parametrize("name", ["gptq 4", "awq", "compressed-tensors", "fp8 blocks", "nvfp4", "mxfp4"])
def test_a_cut_inside_a_group_or_word_is_refused_with_the_numbers(name):
    case = CASES[name]
    shape = case.row_step * 4, case.column_step * 4
    whole = matrix(*shape)
    made = {n: make(whole.T if "qweight" in case.layouts else whole) for n, make in case.make.items()}
    along = [name for name, layout in case.layouts.items() if name in made and _has_border(layout)]
    assert along
    for name in along:
        with pytest.raises(ValueError, match=str(case.column_step + 1)):
            cut(made[name], case.layouts[name], (0, shape[0]), (0, case.column_step + 1), shape)


def _has_border(layout: TensorLayout) -> bool:
    """Whether it may be cut along the inputs, but not everywhere."""
    packed = layout.packed_dim is not None and layout.packed_dim == layout.input_dim
    return layout.input_dim is not None and bool(layout.group_size or layout.block_shape or packed)


def test_a_loader_cuts_by_these_attributes():
    """A packed weight and its scales and zero points, by the loader of merged columns."""
    config = GPTQConfig.from_config({**GPTQ, "group_size": GROUP})
    case = _gptq(4)
    whole = matrix(64, 64)
    for name in ("qweight", "qzeros", "scales"):
        made = case.make[name](whole.T).int()
        param = torch.nn.Parameter(torch.full((made.shape[0], made.shape[1]), -1).int(), requires_grad=False)
        set_weight_attrs(param, config.layouts()[name].attributes())
        halves = []
        for rank in range(2):
            local = torch.nn.Parameter(param.data[:, : made.shape[1] // 2].clone(), requires_grad=False)
            set_weight_attrs(local, config.layouts()[name].attributes())
            with ParallelContext.of_rank(rank, tp_size=2):
                MergedColumnLoader([64])(local, made, 0)
            halves.append(local.data)
        assert torch.equal(torch.cat(halves, 1), made), name
