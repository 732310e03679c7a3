"""Attention sinks: each rank's heads in front, `-inf` behind, on every load."""

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import Module, Parameter

import raywl
from raywl.errors import ShapeMismatchError
from raywl.loaders.sinks import load_attention_sink, load_padded_attn_sink, make_attention_sink
from raywl.types import ParallelContext

INF = float("inf")


def rank(tp_rank, tp_size):
    return ParallelContext(tp_rank=tp_rank, tp_size=tp_size)


def test_a_sink_is_made_neutral():
    sink = make_attention_sink(3)
    assert isinstance(sink, Parameter)
    assert not sink.requires_grad
    assert sink.dtype == torch.get_default_dtype()
    assert sink.tolist() == [-INF] * 3
    assert sink.weight_loader is load_attention_sink
    assert make_attention_sink(2, torch.bfloat16).dtype == torch.bfloat16
    with torch.device("meta"):
        assert make_attention_sink(2).is_meta


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.float8_e8m0fnu], ids=str)
def test_a_dtype_without_infinity_is_refused(dtype):
    with pytest.raises(ValueError, match="has no infinity"):
        make_attention_sink(2, dtype)


def test_each_rank_takes_its_own_heads():
    """C21."""
    heads = torch.arange(8).bfloat16()
    for tp_rank in range(4):
        sink = make_attention_sink(2, torch.bfloat16)
        with rank(tp_rank, 4):
            sink.weight_loader(sink, heads)
        assert sink.tolist() == [2 * tp_rank, 2 * tp_rank + 1]


def test_a_lone_process_takes_all():
    sink = make_attention_sink(4)
    load_attention_sink(sink, torch.arange(4.0))
    assert sink.tolist() == [0, 1, 2, 3]


def test_padding_is_neutral_after_every_load():
    """Also where something else was written to it meanwhile, and at one address."""
    sink = make_attention_sink(5)
    pointer = sink.data_ptr()
    for first in (0.0, 10.0):
        sink.data.fill_(1.0)
        with rank(1, 2):
            load_attention_sink(sink, torch.arange(first, first + 6))
        assert sink.tolist() == [first + 3, first + 4, first + 5, -INF, -INF]
        assert sink.data_ptr() == pointer


@pytest.mark.parametrize(("heads", "size"), [(8, 16), (6, 4)])
def test_heads_that_do_not_divide_are_refused(heads, size):
    """C21: 8 heads on 16 ranks."""
    sink = make_attention_sink(2)
    with rank(1, size), pytest.raises(ValueError, match=f"{heads} heads can't be cut into {size} equal"):
        load_attention_sink(sink, torch.zeros(heads))
    assert sink.tolist() == [-INF] * 2


@pytest.mark.parametrize("shape", [(8,), (2, 2), ()], ids=str)
def test_what_does_not_fit_is_refused_and_nothing_written(shape):
    sink = make_attention_sink(4)
    sink.data.fill_(3.0)
    for load in (load_attention_sink, lambda p, w: load_padded_attn_sink(p, w, 0, len(w) if w.dim() else 1)):
        with pytest.raises(ShapeMismatchError):
            load(sink, torch.zeros(shape))
    assert sink.tolist() == [3] * 4


def test_a_range_of_heads():
    sink = make_attention_sink(8)
    for start, end in ((4, 8), (8, 16), (3, 3)):
        # The range says it all: the ambient rank doesn't count.
        with rank(3, 4):
            load_padded_attn_sink(sink, torch.arange(16.0), start, end)
        assert sink.tolist() == [*range(start, end), *[-INF] * (8 - end + start)]


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 1), (2, 17)])
def test_a_range_outside_is_refused(start, end):
    """A slice would be cut short in silence."""
    with pytest.raises(ValueError, match=f"heads {start} to {end} are not in a checkpoint of 16"):
        load_padded_attn_sink(make_attention_sink(32), torch.zeros(16), start, end)


def test_a_range_goes_through_the_loader_of_the_moment():
    """One that was put there for a reload, say, gets the parameter's whole contents."""
    sink, seen = make_attention_sink(4), []
    sink.weight_loader = lambda param, weight: seen.append((param, weight))
    load_padded_attn_sink(sink, torch.arange(6.0).bfloat16(), 2, 5)
    (found,) = seen
    assert found[0] is sink
    assert found[1].tolist() == [2, 3, 4, -INF]
    assert found[1].dtype == sink.dtype
    assert sink.tolist() == [-INF] * 4


def test_a_loader_that_wraps_the_sinks_own_has_nothing_left_to_cut():
    sink = make_attention_sink(4)
    sink.weight_loader = lambda param, weight: load_attention_sink(param, weight)
    with rank(1, 2):
        load_padded_attn_sink(sink, torch.arange(6.0), 3, 5)
    assert sink.tolist() == [3, 4, -INF, -INF]


def test_a_plain_parameter_is_loaded_too():
    sink = Parameter(torch.zeros(3), requires_grad=False)
    load_padded_attn_sink(sink, torch.arange(4.0), 1, 3)
    assert sink.tolist() == [1, 2, -INF]


class Layer(Module):
    def __init__(self):
        super().__init__()
        self.sinks = make_attention_sink(4, torch.float32)


class Padded(Layer):
    """A model with its own loading."""

    def load_weights(self, weights):
        for name, weight in weights:
            load_padded_attn_sink(getattr(self, name), weight, 2, 5)
        return {"sinks"}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("make", "want"), [(Layer, [3, 4, 5, -INF]), (Padded, [2, 3, 4, -INF])])
def test_lazy_weights_are_read_only_where_they_are_kept(tmp_path, device, make, want):
    """Through `load_into`: three heads of six, converted, and the padding set."""
    save_file({"sinks": torch.arange(6).bfloat16()}, tmp_path / "model.safetensors")
    with torch.device(device):
        model = make()
    report = raywl.load_into(model, str(tmp_path), parallel=rank(1, 2), device="cpu")
    assert model.sinks.tolist() == want
    assert report.plan.nbytes == 6
