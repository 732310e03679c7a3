"""Real Ray clusters of several nodes on this machine, one after the other, and checkpoints for them.

`cluster` has two nodes of two CPUs and serves all tests here that don't need nodes of their own; a test
that takes `driver` is connected to it, freshly.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.cluster.parts import tensors_of


@contextlib.contextmanager
def ray_cluster(*nodes: dict[str, Any]) -> Iterator[Any]:
    """A cluster with these nodes, the first one the head; gone at the end."""
    from ray.cluster_utils import Cluster

    head, *others = nodes
    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **head})
    try:
        for node in others:
            cluster.add_node(**node)
        yield cluster
    finally:
        cluster.shutdown()


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """This process as a driver of a cluster."""
    import ray

    ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def eventually(holds: Callable[[], Any], timeout_s: float, what: str) -> None:
    """Asks until it holds, and fails when it doesn't in time."""
    give_up_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < give_up_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


@pytest.fixture(scope="package")
def cluster() -> Iterator[Any]:
    with ray_cluster({"num_cpus": 2}, {"num_cpus": 2}) as made:
        yield made


@pytest.fixture
def driver(cluster: Any) -> Iterator[Any]:
    with connected(cluster.address):
        yield cluster


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a checkpoint of `parts.tensors_of`."""
    folder = tmp_path_factory.mktemp("checkpoint")
    save_file(tensors_of(torch), folder / "model.safetensors")
    return str(folder)
