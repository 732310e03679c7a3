"""Every error class of raywl, all fields set, arrives as itself from another process."""

from __future__ import annotations

import inspect
import pickle

import pytest

from raywl import errors
from raywl.actors.failures import Place, as_raywl_error, most_telling
from raywl.actors.raycalls import from_ray

PLACE = Place("10.0.0.2", 1)

EXAMPLES = [
    errors.RaywlError("something", "else"),
    errors.CheckpointError("/m", "a.weight", "odd"),
    errors.CorruptFileError("/m/x.safetensors", "a.weight", "header of 0 bytes"),
    errors.MissingFileError("/m", ["a.safetensors", "b.safetensors"], "2 files absent"),
    errors.MissingWeightsError("/m", ["a.weight", "b.weight"], "2 parameters would stay unset"),
    errors.ShapeMismatchError("a.weight", [2, 3], [3, 2], "shape differs"),
    errors.SourceError("org/name", "refused", endpoint="https://hub", status=500),
    errors.AuthError("org/name", "gated", endpoint="https://hub", status=403),
    errors.NotFoundError("/m", "not found", endpoint="https://hub", status=404, local=True),
    errors.OfflineError("org/name", "offline", endpoint="https://hub", status=0),
    errors.LockError("/m.lock", "held", holder="host:1 since noon"),
    errors.CapacityError("GPUs", 8.0, 2.0, "busy", unit="pieces"),
    errors.ClusterError("odd", node="10.0.0.2", rank=1),
    errors.NodeLostError("died", node="10.0.0.2", rank=1),
    errors.LeaseLostError("ran out", node="10.0.0.2", rank=1),
    errors.StagingTimeout("late", node="10.0.0.2", rank=1),
]


def filled(error: errors.RaywlError) -> errors.RaywlError:
    """The error with what else it can carry."""
    copy = pickle.loads(pickle.dumps(error)).at("rank 3 on node 10.0.0.4")
    copy.add_note("caused by OSError: [Errno 5] Input/output error")
    return copy


def assert_same(got: BaseException, sent: errors.RaywlError) -> None:
    assert type(got) is type(sent)
    assert got.args == sent.args
    assert vars(got) == vars(sent)
    assert str(got) == str(sent)


def test_no_class_is_left_out():
    """The list above is the whole tree."""
    tree = {c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.RaywlError)}
    assert {type(error) for error in EXAMPLES} == tree


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_through_pickle(error):
    """Twice, as from a rank by way of an agent."""
    sent = filled(error)
    assert_same(pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(sent)))), sent)


def test_through_a_ray_task(driver):
    """Raised there and taken apart here, and returned as a value."""
    import ray

    def raise_it(error: errors.RaywlError) -> None:
        raise error

    raising = ray.remote(num_cpus=0, max_retries=0)(raise_it)
    returning = ray.remote(num_cpus=0)(lambda error: error)
    sent = [filled(error) for error in EXAMPLES]
    for error in sent:
        with pytest.raises(ray.exceptions.RayTaskError) as caught:
            ray.get(raising.remote(error), timeout=60)
        assert_same(from_ray(caught.value, PLACE), error)
        assert_same(ray.get(returning.remote(error), timeout=60), error)


def test_the_place_is_noted_once():
    """An agent's error that comes by way of a rank keeps the agent's node."""
    error = errors.CorruptFileError("/m", None, "odd").at("node 10.0.0.9")
    assert as_raywl_error(error, PLACE, "load_into").where == "node 10.0.0.9"
    plain = as_raywl_error(errors.CorruptFileError("/m", None, "odd"), PLACE, "load_into")
    assert str(plain) == "[rank 1 on node 10.0.0.2] /m: odd"


def test_any_other_exception_becomes_a_cluster_error():
    """With class, text and traceback, and what caused a raywl error as a note."""
    try:
        raise ZeroDivisionError("division by zero")
    except ZeroDivisionError as raised:
        told = as_raywl_error(raised, PLACE, "model_factory")
    assert type(told) is errors.ClusterError
    assert (told.rank, told.node) == (1, "10.0.0.2")
    assert str(told) == "[rank 1 on node 10.0.0.2] model_factory raised ZeroDivisionError: division by zero"
    assert "Traceback" in told.__notes__[0]
    try:
        raise errors.SourceError("/m", "can't be read") from OSError(5, "Input/output error")
    except errors.SourceError as raised:
        told = as_raywl_error(raised, PLACE, "load_into")
    assert told.__notes__ == ["caused by OSError: [Errno 5] Input/output error"]


def test_the_cause_is_told_before_its_echo():
    """A dead rank comes before the peers that lost it, and raywl's own finding before both."""
    echo = errors.ClusterError("connection closed by peer", rank=0)
    lost = errors.NodeLostError("died", rank=1)
    damaged = errors.CorruptFileError("/m", None, "odd")
    assert most_telling({0: echo, 1: lost}) is lost
    assert most_telling({0: echo, 1: lost, 2: damaged}) is damaged
    assert any("connection closed" in note for note in lost.__notes__)
