"""Ranks that iterate together end together, whichever of them ends first and how."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from raywl.errors import ClusterError
from raywl.iterators.together import check_same, resolve_group, together
from tests.iterators import scenarios
from tests.iterators.ranks import run_ranks


@pytest.mark.parametrize("how", ["-", "over a GPU's group"])
def test_all_say_and_hear_the_same(how):
    """Also where the group that they were given moves no tensors of the CPU."""
    assert [rank.value for rank in run_ranks(scenarios.line, 3, "nobody", how)] == ["done"] * 3


@pytest.mark.parametrize(
    ("who", "how"),
    [
        ("first", "raises"),
        ("first", "dies"),
        ("last", "dies"),
        ("last", "returns"),
        pytest.param("first", "returns", marks=pytest.mark.slow),
        pytest.param("last", "raises", marks=pytest.mark.slow),
    ],
)
def test_one_that_ends_early_ends_all(who, how):
    """Four ranks, so that one of them isn't next to the one that ends; all stay alive afterwards."""
    ranks = run_ranks(scenarios.line, 4, who, how)
    ends = ranks.pop(0 if who == "first" else 3)
    assert {"raises": "KeyError", "dies": "killed", "returns": ""}[how] == ends.kind
    for rank in ranks:
        assert isinstance(rank.error, ClusterError)
        if how == "raises":
            where = 0 if who == "first" else 3
            assert str(rank.error) == f"[rank {where} of the group] failed: KeyError: 'in the middle'"
        else:
            assert "has gone without a word" in str(rank.error)


def test_the_store_may_die_with_a_rank():
    """A group that was made without an agent keeps its store in its first rank."""
    first, *others = run_ranks(scenarios.line, 3, "first", "dies", store="rank 0")
    assert first.kind == "killed"
    assert all(isinstance(rank.error, ClusterError) for rank in others)


@pytest.mark.parametrize("victim", [0, 3, pytest.param(1, marks=pytest.mark.slow)])
def test_one_that_was_gone_before_is_named(victim):
    ranks = run_ranks(scenarios.meet, 4, victim)
    assert ranks.pop(victim).kind == "killed"
    for rank in ranks:
        assert isinstance(rank.error, ClusterError)
        assert rank.error.rank == victim
        assert f"rank {victim} of the group has gone" in str(rank.error)


def test_a_line_can_follow_another():
    """None is left half closed for the next, however fast they come."""
    assert [rank.value for rank in run_ranks(scenarios.line_again, 4, 30)] == [30] * 4


def test_alone_there_is_nobody_to_talk_to():
    with together(None, "group") as ranks:
        assert ranks is None
    assert resolve_group(...) is None
    assert resolve_group(None) is None


def test_who_disagrees_is_named():
    check_same("files", [["a"], ["a"]])
    with pytest.raises(ClusterError, match=r"disagree on files: ranks 0, 2: \['a'\]; rank 1: \[\]"):
        check_same("files", [["a"], [], ["a"]])


def test_a_process_outside_the_group_is_refused(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with together(dist.group.WORLD, "group") as ranks:
            assert ranks is None
        with pytest.raises(ValueError, match="none of the ranks of cpu_weights_group"):
            together(dist.GroupMember.NON_GROUP_MEMBER, "cpu_weights_group")
    finally:
        dist.destroy_process_group()
