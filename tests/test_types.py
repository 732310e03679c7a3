"""The vocabulary: where a rank stands, and how a tensor is cut."""

import asyncio
import contextlib
import pickle
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raywl import ParallelContext, Replicate, Shard, current_context
from raywl.types import as_shard_spec

SIZES = st.integers(1, 4)


@st.composite
def groups(draw):
    tp, dp, pp = draw(SIZES), draw(SIZES), draw(SIZES)
    ep = draw(st.sampled_from([n for n in range(1, tp * dp + 1) if tp * dp % n == 0]))
    return {"tp_size": tp, "dp_size": dp, "pp_size": pp, "ep_size": ep}


@given(groups())
def test_ranks_of_a_group(sizes):
    """Every rank stands in one place of its own; tp varies fastest, then dp, then pp."""
    world = sizes["tp_size"] * sizes["dp_size"] * sizes["pp_size"]
    ranks = [ParallelContext.of_rank(rank, **sizes) for rank in range(world)]
    assert [context.rank for context in ranks] == list(range(world))
    assert {context.world_size for context in ranks} == {world}
    places = [(context.pp_rank, context.dp_rank, context.tp_rank) for context in ranks]
    assert places == sorted(places)
    assert len(set(places)) == world


@given(groups())
def test_experts_of_a_stage(sizes):
    """In a stage each part of each expert group is on one rank, and neighbours share an expert."""
    stage_size = sizes["tp_size"] * sizes["dp_size"]
    stage = [ParallelContext.of_rank(rank, **sizes) for rank in range(stage_size)]
    assert {context.moe_tp_size for context in stage} == {stage_size // sizes["ep_size"]}
    places = [(context.ep_rank, context.moe_tp_rank) for context in stage]
    if sizes["ep_size"] > 1:
        assert places == sorted(places)
    assert len(set(places)) == stage_size


def test_as_the_design_has_it():
    """tp 2, ep 2: two ranks with whole experts; tp 4, ep 2: four ranks with half experts."""
    two = [ParallelContext.of_rank(rank, tp_size=2, ep_size=2) for rank in range(2)]
    assert [(c.ep_rank, c.moe_tp_rank, c.moe_tp_size) for c in two] == [(0, 0, 1), (1, 0, 1)]
    four = [ParallelContext.of_rank(rank, tp_size=4, ep_size=2) for rank in range(4)]
    assert [(c.ep_rank, c.moe_tp_rank) for c in four] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {c.moe_tp_size for c in four} == {2}


def test_by_default_alone():
    alone = ParallelContext()
    assert alone == ParallelContext.of_rank(0)
    assert {
        name: value for name, value in alone.to_dict().items() if name.endswith("_rank")
    } == dict.fromkeys(["tp_rank", "pp_rank", "dp_rank", "ep_rank", "moe_tp_rank", "local_rank"], 0)
    assert {value for name, value in alone.to_dict().items() if name.endswith("_size")} == {1}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tp_size": 0}, ["tp_size", "0"]),
        ({"tp_rank": 2, "tp_size": 2}, ["tp_rank 2", "0..1"]),
        ({"tp_rank": -1, "tp_size": 2}, ["tp_rank -1"]),
        ({"local_rank": 1}, ["local_rank 1"]),
        ({"tp_size": 4, "ep_size": 3}, ["ep_size 3", "4"]),
        ({"ep_size": 0}, ["ep_size", "0"]),
        ({"ep_rank": 2, "ep_size": 2}, ["ep_rank 2"]),
    ],
    ids=str,
)
def test_no_such_place(fields, words):
    """A rank outside its size, or sizes that don't divide, say so with the numbers."""
    with pytest.raises(ValueError) as caught:
        ParallelContext(**fields)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("rank", "sizes", "words"),
    [
        (2, {"tp_size": 2}, ["rank 2", "0..1"]),
        (-1, {"tp_size": 2}, ["rank -1"]),
        (0, {"tp_size": 2, "ep_size": 4}, ["ep_size 4", "2"]),
        (0, {"dp_size": 0}, ["dp_size", "0"]),
        (0, {"ep_size": 0}, ["ep_size", "0"]),
    ],
    ids=str,
)
def test_no_such_rank(rank, sizes, words):
    with pytest.raises(ValueError) as caught:
        ParallelContext.of_rank(rank, **sizes)
    for word in words:
        assert word in str(caught.value)


def test_ambient():
    """Contexts nest, end with their block also on an error, and don't leak into other threads or tasks."""
    outer, inner = ParallelContext(tp_size=2), ParallelContext(tp_rank=1, tp_size=2)
    assert current_context() is None
    with outer:
        with contextlib.suppress(KeyError), inner:
            assert current_context() is inner
            raise KeyError
        with outer:
            assert current_context() is outer
        assert current_context() is outer
        seen = []
        thread = threading.Thread(target=lambda: seen.append(current_context()))
        thread.start()
        thread.join(10)
        assert seen == [None]
    assert current_context() is None


def test_ambient_in_tasks():
    """Two tasks that take turns each see their own."""

    async def one(rank: int, mine: asyncio.Event, other: asyncio.Event) -> int:
        with ParallelContext(tp_rank=rank, tp_size=2):
            mine.set()
            await asyncio.wait_for(other.wait(), 10)
            return current_context().tp_rank

    async def both() -> list[int]:
        first, second = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(one(0, first, second), one(1, second, first))

    assert asyncio.run(both()) == [0, 1]


def test_values_are_frozen_and_pickle():
    context = ParallelContext.of_rank(3, tp_size=2, dp_size=2, ep_size=2, local_rank=1, local_size=2)
    for value in (context, Shard(1), Replicate()):
        assert pickle.loads(pickle.dumps(value)) == value
        assert hash(value) == hash(pickle.loads(pickle.dumps(value)))
        with pytest.raises((AttributeError, TypeError)):
            value.dim = 3


def test_torch_placements_become_ours():
    """torch's own are taken and converted; what no bytes of a checkpoint correspond to is refused by name."""
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard
    from torch.distributed.tensor.placement_types import _StridedShard

    assert as_shard_spec(TorchShard(1)) == Shard(1)
    assert as_shard_spec(TorchReplicate()) == Replicate()
    assert as_shard_spec(Shard(0)) == Shard(0)
    with pytest.raises(ValueError, match="Partial"):
        as_shard_spec(Partial())
    with pytest.raises(ValueError, match="StridedShard"):
        as_shard_spec(_StridedShard(0, split_factor=2))
    with pytest.raises(TypeError, match="colwise"):
        as_shard_spec("colwise")
