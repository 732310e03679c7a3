"""Errors keep their class, fields and words through pickle, copies and other processes."""

import copy
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import pytest

import raywl
from raywl import errors
from raywl.errors import (
    AuthError,
    CapacityError,
    CheckpointError,
    ClusterError,
    CorruptFileError,
    LeaseLostError,
    LockError,
    MissingFileError,
    MissingWeightsError,
    NodeLostError,
    NotFoundError,
    OfflineError,
    RaywlError,
    ShapeMismatchError,
    SourceError,
    StagingTimeout,
)

FULL = [
    RaywlError("words"),
    CheckpointError("/x/m", "t", "why"),
    CorruptFileError("/x/m", "t", "why"),
    MissingFileError("/x", ["b", "a"], "why"),
    MissingWeightsError("/x", ["w", "v"], "why"),
    ShapeMismatchError("t", (2, 3), [4], "why"),
    SourceError("s3://b/k", "why", endpoint="http://e", status=500),
    AuthError("s3://b/k", "why", endpoint="http://e", status=403),
    NotFoundError("/x", "why", endpoint="http://e", status=404, local=True),
    OfflineError("org/name", "why", endpoint="http://e", status=1),
    LockError("/x.lock", "why", holder="pid 3"),
    CapacityError("CPUs", 8, 2.5, "why", unit="CPU"),
    ClusterError("why", node="10.0.0.2", rank=0),
    NodeLostError("why", node="10.0.0.2", rank=0),
    LeaseLostError("why", node="10.0.0.2", rank=0),
    StagingTimeout("why", node="10.0.0.2", rank=0),
]
"""One of each class, every field set."""

BUILT_IN = {
    CorruptFileError: [ValueError],
    MissingFileError: [FileNotFoundError],
    MissingWeightsError: [ValueError],
    ShapeMismatchError: [ValueError, AssertionError],
    SourceError: [OSError],
    AuthError: [PermissionError],
    NotFoundError: [FileNotFoundError],
    OfflineError: [ConnectionError],
    LockError: [OSError],
    CapacityError: [RuntimeError],
    ClusterError: [RuntimeError],
    StagingTimeout: [TimeoutError],
}
by_class = pytest.mark.parametrize("error", FULL, ids=lambda error: type(error).__name__)


def check_same(copied: BaseException, error: RaywlError) -> None:
    assert type(copied) is type(error)
    assert copied.__dict__ == error.__dict__
    assert copied.args == error.args
    assert str(copied) == str(error)


def test_every_class_is_here():
    """A class that is added is tested below, exported, and in the tree at the top of its module."""
    classes = {
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, RaywlError)
    }
    assert {type(error) for error in FULL} == classes
    assert {cls.__name__ for cls in classes} == set(errors.__all__)
    for cls in classes:
        assert cls.__name__ in errors.__doc__
    assert raywl.errors is errors


@by_class
def test_pickles(error):
    """Class, fields and words survive pickle and copy, with and without a place."""
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        check_same(pickle.loads(pickle.dumps(error, protocol)), error)
    check_same(copy.copy(error), error)
    check_same(copy.deepcopy(error), error)
    placed = copy.copy(error).at("rank 1 on node 10.0.0.2")
    assert error.where is None
    again = pickle.loads(pickle.dumps(placed))
    check_same(again, placed)
    assert str(again).startswith("[rank 1 on node 10.0.0.2] ")


def _raise(error: RaywlError) -> None:
    raise error


def test_from_another_process():
    """`except` works for what a process of a pool raised."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        for error in FULL:
            future = pool.submit(_raise, error)
            with pytest.raises(type(error)) as caught:
                future.result(60)
            assert str(caught.value) == str(error)
            assert {k: v for k, v in caught.value.__dict__.items() if k != "__notes__"} == error.__dict__


def test_from_a_ray_task():
    """The same for what a Ray task raised: it is caught by its own class, with its fields."""
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False, configure_logging=False)
    try:
        task = ray.remote(max_retries=0)(_raise)
        for error in FULL:
            with pytest.raises(type(error)) as caught:
                ray.get(task.remote(error), timeout=60)
            assert isinstance(caught.value, ray.exceptions.RayTaskError)
            check_same(caught.value.cause, error)
    finally:
        ray.shutdown()


@by_class
def test_words(error):
    """The message has every field that was set; what is unset isn't shown."""
    text = str(error)
    for value in error.__dict__.values():
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, str) or (isinstance(part, int) and not isinstance(part, bool)):
                assert str(part) in text
    assert "None" not in text


@by_class
def test_built_in_relatives(error):
    """Code that catches the built-in class goes on working."""
    for cls in BUILT_IN.get(type(error), []):
        assert isinstance(error, cls)
    assert isinstance(error, RaywlError)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (CheckpointError(None, None, "why"), "why"),
        (CheckpointError("/m", None, "why"), "/m: why"),
        (CorruptFileError("/m", "t", "why"), "/m: tensor 't': why"),
        (MissingWeightsError(None, ["a"], "left unset"), "left unset: a"),
        (ShapeMismatchError(None, (1, 2), (3,)), "shape differs: expected [1, 2], got [3]"),
        (ShapeMismatchError("t", (), (3,)), "t: shape differs: expected [], got [3]"),
        (SourceError("ref", "why"), "ref: why"),
        (NotFoundError("ref", "why", status=404), "ref: why (status 404)"),
        (LockError("l", "why"), "l: why"),
        (
            CapacityError("GPUs", 8, 2, "wait for a node"),
            "not enough GPUs: 8 needed, 2 available; wait for a node",
        ),
        (
            CapacityError("memory", 100_000_000_001, 12.5, "x", unit="bytes"),
            "not enough memory: 100000000001 bytes needed, 12.5 bytes available; x",
        ),
        (ClusterError("why"), "why"),
        (ClusterError("why", rank=0), "why (rank 0)"),
        (ClusterError("why", rank=0).at("rank 0 on node n"), "[rank 0 on node n] why"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_message(error, text):
    assert str(error) == text


def test_long_lists_are_cut_in_the_message_alone():
    names = [f"w{i}" for i in range(1000)]
    error = MissingWeightsError("/m", names, "left unset")
    assert list(error.names) == names
    assert str(error).endswith("w11 and 988 more")


def test_no_such_name():
    """`raywl` says plainly what it hasn't got."""
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = raywl.nothing
