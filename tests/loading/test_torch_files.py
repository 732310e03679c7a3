"""Models loaded from files of `torch.save`: what `load_state_dict` gives, and no byte more is read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import raywl
from raywl import ParallelContext, Shard
from raywl.errors import CheckpointError
from tests.torch_states import KINDS, bits, save_sharded, states, storage


class Layer(nn.Module):
    """Weights that files hold turned, cut, tied and as they are."""

    def __init__(self, tp_size: int = 1, device: str = "cpu") -> None:
        super().__init__()
        self.up = nn.Linear(12, 8 // tp_size, device=device)
        self.down = nn.Linear(8 // tp_size, 12, bias=False, device=device)
        self.norm = nn.LayerNorm(12, device=device)


def state_of(seed: int = 0) -> dict[str, torch.Tensor]:
    """The layer's weights, as views of two storages."""
    one, two = storage(torch.int32, 300, seed).float(), storage(torch.int16, 96, seed + 1).float()
    return {
        "up.weight": one[:96].view(12, 8).t(),
        "up.bias": one[96:192:12],
        "down.weight": two.view(12, 8),
        "norm.weight": one[100:112],
        "norm.bias": one[100:112],
    }


SHARDS = {"up.*": Shard(0), "down.weight": Shard(1)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_load_is_load_state_dict(device, kind, tmp_path):
    """The same bits, from one file and from a set with its index, and by a plan that was recorded."""
    state = state_of()
    expected = Layer()
    expected.load_state_dict(state)
    torch.save(state, tmp_path / "model.bin", **KINDS[kind])
    names = list(state)
    shards = {"pytorch_model-00001-of-00002.bin": names[:2], "pytorch_model-00002-of-00002.bin": names[2:]}
    folder = {file: {name: state[name] for name in of_file} for file, of_file in shards.items()}
    save_sharded(folder, tmp_path / "set", **KINDS[kind])
    for ref in (tmp_path / "model.bin", tmp_path / "set"):
        model = Layer(device=device)
        report = raywl.load_into(model, ref, strict="exact")
        assert sorted(report.loaded) == sorted(state)
        again = Layer(device=device)
        raywl.load_into(again, ref, plan=report.plan)
        for loaded in (model, again):
            for name, tensor in expected.state_dict().items():
                assert bits(loaded.state_dict()[name]) == bits(tensor)


@pytest.mark.parametrize("kind", ["zip", "before-1.6"])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_each_rank_has_its_cut(tp_size, kind, tmp_path):
    """Rows of what is stored turned, and columns of what isn't: the ranks' parts make the whole."""
    state = state_of()
    torch.save(state, tmp_path / "model.pt", **KINDS[kind])
    for rank in range(tp_size):
        context = ParallelContext.of_rank(rank, tp_size=tp_size)
        model = Layer(tp_size)
        report = raywl.load_into(model, tmp_path, parallel=context, shards=SHARDS)
        assert torch.equal(model.up.weight, state["up.weight"].chunk(tp_size, 0)[rank])
        assert torch.equal(model.up.bias, state["up.bias"].chunk(tp_size, 0)[rank])
        assert torch.equal(model.down.weight, state["down.weight"].chunk(tp_size, 1)[rank])
        assert torch.equal(model.norm.weight, state["norm.weight"])
        plan = raywl.open_checkpoint(tmp_path).plan(parallel=context, shards=SHARDS)
        assert plan.nbytes_kept == report.bytes_loaded == sum(p.nbytes for p in model.parameters())


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@given(state=states(), kind=st.sampled_from(sorted(KINDS)), tp_size=st.integers(1, 3), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_view_is_cut_as_torch_cuts_it(tmp_path_factory, state, kind, tp_size, data):
    """Any dim of any view, for any rank: what `narrow` gives of the tensor."""
    path = tmp_path_factory.mktemp("state") / "model.pt"
    torch.save(state, path, **KINDS[kind])
    rank = data.draw(st.integers(0, tp_size - 1))
    module, shards, expected = nn.Module(), {}, {}
    for i, tensor in enumerate(state.values()):
        dim = data.draw(st.integers(0, tensor.dim() - 1)) if tensor.dim() else None
        part = tensor
        if dim is not None:
            length = -(-tensor.shape[dim] // tp_size)
            first = min(rank * length, tensor.shape[dim])
            part = tensor.narrow(dim, first, min(length, tensor.shape[dim] - first))
            shards[f"t{i}"] = Shard(dim)
        module.register_buffer(f"t{i}", torch.empty(part.shape, dtype=part.dtype))
        expected[f"t{i}"] = part

    class Numbered:
        def map_name(self, name: str) -> str:
            return f"t{list(state).index(name)}"

    context = ParallelContext.of_rank(rank, tp_size=tp_size)
    raywl.load_into(module, path, parallel=context, shards=shards, mapper=Numbered())
    for name, part in expected.items():
        assert bits(module.get_buffer(name)) == bits(part)


@pytest.mark.parametrize("strategy", ["auto", "buffered", "direct", "mmap", "prefetch"])
def test_every_strategy_reads_alike(strategy, tmp_path):
    state = {"turned": torch.arange(3_000_000.0).view(1000, 3000).t(), "rows": torch.arange(5000.0)[1000:]}
    torch.save(state, tmp_path / "model.pt")
    module = nn.Module()
    for name, tensor in state.items():
        module.register_buffer(name, torch.zeros(tensor.shape))
    raywl.load_into(module, tmp_path, strategy=strategy)
    found = dict(raywl.open_checkpoint(tmp_path).iter_weights(strategy=strategy))
    for name, tensor in state.items():
        assert torch.equal(module.get_buffer(name), tensor)
        assert torch.equal(found[name], tensor)


def test_loaders_get_the_view(tmp_path):
    """Weight loaders see shape and strides as torch does, narrow as they like, and only that is read."""
    base = torch.arange(4096.0 * 64).view(64, 4096)
    torch.save({"turned": base.t(), "plain": base}, tmp_path / "model.pt")
    seen = {}

    def loader(param: nn.Parameter, weight: torch.Tensor) -> None:
        seen[param.key] = (tuple(weight.shape), weight.stride(), weight.is_contiguous())
        param.copy_(weight.narrow(0, 8, 2) if param.key == "plain" else weight[:, 8:10])

    model = nn.Module()
    for name, shape in (("turned", (4096, 2)), ("plain", (2, 4096))):
        param = nn.Parameter(torch.zeros(shape), requires_grad=False)
        param.key, param.weight_loader = name, loader
        model.register_parameter(name, param)
    report = raywl.load_into(model, tmp_path)
    assert seen == {"turned": ((4096, 64), (1, 4096), False), "plain": ((64, 4096), (4096, 1), True)}
    assert torch.equal(model.turned, base.t()[:, 8:10])
    assert torch.equal(model.plain, base[8:10])
    # Two rows of the storage each.
    assert report.bytes_read <= 2 * (2 * 4096 * 4) + 8192


def test_computing_with_views(tmp_path):
    """A loader that looks at values gets those of the view; a model's own `load_weights` does, too."""
    base = torch.arange(12.0)
    torch.save({"a": base.view(3, 4).t(), "b": base[1::3], "c": base[:1].expand(5)}, tmp_path / "model.pt")

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = nn.Parameter(torch.zeros(3), requires_grad=False)
            self.got: dict[str, torch.Tensor] = {}

        def load_weights(self, weights) -> set[str]:
            for i, (name, weight) in enumerate(weights):
                self.total[i] = weight.sum()
                self.got[name] = weight.contiguous() + 0
            return {"total"}

    model = Own()
    raywl.load_into(model, tmp_path)
    assert torch.equal(model.got["a"], base.view(3, 4).t())
    assert torch.equal(model.got["b"], base[1::3])
    assert torch.equal(model.got["c"], torch.zeros(5))
    assert model.total.tolist() == [66.0, float(base[1::3].sum()), 0.0]


def test_other_dtypes_are_converted(tmp_path):
    """As from safetensors: floats into other floats, and complex numbers of 128 bits only into their own."""
    turned = torch.randn(3, 4, dtype=torch.float64).t()
    torch.save({"a": turned, "c": torch.randn(3, dtype=torch.complex128)}, tmp_path / "model.pt")
    module = nn.Module()
    module.register_buffer("a", torch.zeros(4, 3, dtype=torch.bfloat16))
    module.register_buffer("c", torch.zeros(3, dtype=torch.complex64))
    raywl.load_into(module, tmp_path)
    assert torch.equal(module.a, turned.bfloat16())
    real = nn.Module()
    real.register_buffer("a", torch.zeros(4, 3))
    real.register_buffer("c", torch.zeros(3))
    with pytest.raises(CheckpointError, match="can't hold"):
        raywl.load_into(real, tmp_path)


def test_reload_and_the_other_format(tmp_path):
    """A live model takes new weights from files of `torch.save`, in place, after a load from safetensors."""
    from safetensors.torch import save_file

    first, second = state_of(0), state_of(5)
    (tmp_path / "one").mkdir()
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in first.items()},
        tmp_path / "one" / "m.safetensors",
    )
    (tmp_path / "two").mkdir()
    torch.save(second, tmp_path / "two" / "pytorch_model.bin")
    model = Layer()
    raywl.load_into(model, tmp_path / "one")
    places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    raywl.reload_into(model, tmp_path / "two")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, second[name])
        assert tensor.data_ptr() == places[name]


def test_a_table_needs_rows_in_order(tmp_path):
    """Shared tables read rows as they lie in the file: another view is refused, by name."""
    from raywl.tables.layout import TableLayout

    base = torch.zeros(4, 6)
    torch.save({"rows": base, "turned": base.t()}, tmp_path / "model.pt")
    found = raywl.open_checkpoint(tmp_path).tensors
    assert TableLayout.of_entry("rows", found["rows"], None).shape == (4, 6)
    with pytest.raises(CheckpointError, match="raywl convert"):
        TableLayout.of_entry("turned", found["turned"], None)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_transformers(tied, tmp_path):
    """A sharded `.bin` checkpoint of a causal model, tied or not, gives the logits of the model saved."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(3)
    saved = transformers.AutoModelForCausalLM.from_config(config)
    state = saved.state_dict()
    names = list(state)
    half = len(names) // 2
    folder = save_sharded(
        {
            "pytorch_model-00001-of-00002.bin": {name: state[name] for name in names[:half]},
            "pytorch_model-00002-of-00002.bin": {name: state[name] for name in names[half:]},
        },
        tmp_path,
    )
    saved.config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    report = raywl.load_into(model, folder, strict="exact")
    assert report.missing == report.unexpected == []
    tokens = torch.tensor([[1, 5, 9, 40]])
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens).logits, saved.eval()(tokens).logits)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
