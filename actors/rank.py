"""The actor that is one rank: it builds the model, loads it, and stays to run functions on it."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from raywl.actors.devices import cuda_index, interface_of, num_cores, num_threads
from raywl.actors.failures import Place, as_raywl_error
from raywl.actors.rank_feed import FeedLink, RankFeed, StreamJob
from raywl.actors.requests import SourceRequest
from raywl.errors import ClusterError
from raywl.types import ParallelContext

if TYPE_CHECKING:
    import torch

    from raywl.checkpoint import Manifest
    from raywl.loading.reload import ReloadReport
    from raywl.node.prefetch import FileRange
    from raywl.opening import Checkpoint
    from raywl.report import LoadReport

__all__ = ["Job", "RankFacts", "RankLink", "RankLoader", "RankSpec", "Rendezvous"]


class RankLink(FeedLink, Protocol):
    """What a rank asks of the cluster."""

    def gpu_ids(self) -> list[str]:
        """Ray's ids of the GPUs that this process was given."""

    def pickle(self, value: Any) -> bytes:
        """`value` in bytes, functions and classes of scripts included."""

    def checkpoint(self, node_id: str, request: SourceRequest, identity: str, timeout_s: float) -> bytes:
        """The pickled checkpoint, from the agent of the node."""

    def count(self, report: LoadReport, spec: RankSpec, work: str) -> None:
        """Counts a load or reload for the cluster's metrics."""

    def warm(self, node_id: str, group: str, paths: dict[str, str], ranges: list[FileRange]) -> None:
        """Asks the agent of the node to fill the page cache; doesn't wait."""


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Who a rank is, known before its process starts."""

    rank: int
    """Counted over all replicas."""
    context: ParallelContext
    """Where it stands in its replica."""
    node_id: str
    node: str
    """What the node is called."""
    address: str
    """The node's address, for the ranks' own connections."""
    group: str
    """The name of its group, for counters."""

    @property
    def place(self) -> Place:
        """For messages."""
        return Place(self.node, self.rank)


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What only the started process knows."""

    pid: int
    device: str


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of a replica meet."""

    host: str
    port: int
    backend: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Job:
    """What to load."""

    request: SourceRequest
    identity: str
    work: bytes
    """Pickled: the model factory, and the keyword arguments of `load_into`."""
    timeout_s: float
    """For the wait on the node's agent."""
    stream: StreamJob | None = None
    """Where the checkpoint comes to no disk: how its bytes come instead."""


class RankLoader:
    """One rank. Every method runs in the rank's own process.

    1. `launch` makes it in a bundle of the group's placement group; it never starts again by itself.
    2. `start` settles device and threads.
    3. `serve_store` (the first rank of each replica) and `join` set up `torch.distributed`.
    4. `load` builds the model and fills it; `progress` says how far it is, from another thread.
    5. `run` calls functions on the model, one after the other.
    6. `check_reload` looks whether another checkpoint fits, on all ranks of the group; `reload` then writes
       it in place.
    7. The driver ends it by killing the process; when the driver dies, Ray does.
    """

    def __init__(self, spec: RankSpec, link: RankLink) -> None:
        self._spec, self._link = spec, link
        self._model: torch.nn.Module | None = None
        self._arguments: dict[str, Any] = {}
        self._device = "cpu"
        self._store: Any = None
        self._progress = (0, 0, "start")
        self._progress_lock = threading.Lock()

    def start(self) -> RankFacts:
        """Settles the device and the number of threads.

        Raises:
            ClusterError: The GPU that Ray gave can't be used.
        """
        with self._as_raywl("starting the rank"):
            import torch

            context = self._spec.context
            torch.set_num_threads(num_threads(num_cores(), context.local_size))
            index = cuda_index(self._link.gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES"))
            if index is not None:
                if not torch.cuda.is_available():
                    raise ClusterError("Ray gave this rank a GPU, but torch finds no usable CUDA there")
                torch.cuda.set_device(index)
                self._device = f"cuda:{index}"
            return RankFacts(os.getpid(), self._device)

    def serve_store(self, timeout_s: float) -> int:
        """Opens the store through which the replica's ranks find each other; returns its port."""
        with self._as_raywl("opening the torch.distributed store"):
            # Port 0: the store takes a free one itself, so nobody can take it in between.
            self._store = self._open_store(self._spec.address, 0, timeout_s, serve=True)
            port: int = self._store.port
            return port

    def join(self, meeting: Rendezvous) -> None:
        """Initialises `torch.distributed` over the replica's ranks."""
        with self._as_raywl("torch.distributed.init_process_group"):
            import torch.distributed as dist

            context = self._spec.context
            interface = interface_of(self._spec.address)
            if interface is not None:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            if self._store is None:
                self._store = self._open_store(meeting.host, meeting.port, meeting.timeout_s, serve=False)
            dist.init_process_group(
                meeting.backend, store=self._store, rank=context.rank, world_size=context.world_size
            )

    def _open_store(self, host: str, port: int, timeout_s: float, *, serve: bool) -> Any:
        from torch import distributed

        # Through getattr, since torch's type information doesn't export the name.
        store = getattr(distributed, "TCPStore")  # noqa: B009
        timeout = timedelta(seconds=timeout_s)
        size = self._spec.context.world_size
        return store(host, port, size, is_master=serve, timeout=timeout, wait_for_workers=False)

    def load(self, job: Job) -> LoadReport:
        """Builds the model and loads the checkpoint into it.

        Raises:
            RaywlError: As `load_into`, or a `ClusterError` for what the model factory raised; with rank
                and node.
        """
        self._model = None
        with self._as_raywl("reading the model factory"):
            factory, arguments = pickle.loads(job.work)  # noqa: S301 (from the own driver)
        checkpoint = self._checkpoint(job)
        with self._as_raywl("model_factory"), self._spec.context:
            import torch

            model = factory(self._spec.context)
            if not isinstance(model, torch.nn.Module):
                raise TypeError(f"it returned {type(model).__name__}, not a torch.nn.Module")
        with (
            self._as_raywl("load_into"),
            self._spec.context,
            self._warmed_by_agent(job),
            warnings.catch_warnings(),
        ):
            from raywl.loading import load_into

            # The driver says it once, for all ranks together.
            warnings.filterwarnings("ignore", message=r"\d+ tensors of .* have no place in the model")
            warnings.filterwarnings("ignore", message="shards match no parameter")
            report = load_into(
                model,
                checkpoint,
                parallel=self._spec.context,
                progress=self._note_progress,
                **{"device": self._device, **arguments},
            )
        report.node = self._spec.node
        self._model, self._arguments = model, arguments
        self._link.count(report, self._spec, "load")
        return report

    def check_reload(self, job: Job) -> None:
        """Checks that a checkpoint can be loaded in place; writes nothing.

        Raises:
            RaywlError: As `raywl.loading.check_reload`; with rank and node.
        """
        checkpoint = self._checkpoint(job)
        with self._as_raywl("check_reload"), self._spec.context:
            from raywl.loading import check_reload

            arguments = {k: v for k, v in self._arguments.items() if k not in ("device", "strategy")}
            check_reload(self._loaded(), checkpoint, parallel=self._spec.context, **arguments)

    def reload(self, job: Job) -> ReloadReport:
        """Loads a checkpoint in place, after `check_reload`.

        Raises:
            RaywlError: As `raywl.reload_into`; with rank and node.
        """
        checkpoint = self._checkpoint(job)
        with self._as_raywl("reload_into"), self._spec.context, self._warmed_by_agent(job):
            from raywl.loading import reload_into

            arguments = {k: v for k, v in self._arguments.items() if k != "device"}
            report = reload_into(
                self._loaded(),
                checkpoint,
                parallel=self._spec.context,
                progress=self._note_progress,
                **arguments,
            )
        report.node = self._spec.node
        self._link.count(report, self._spec, "reload")
        return report

    @contextlib.contextmanager
    def _warmed_by_agent(self, job: Job) -> Iterator[None]:
        """Prefetches through the node's agent, which reads for all ranks of the node what they want."""
        from raywl.readers.prefetching import prefetch_with

        @contextlib.contextmanager
        def warm(manifest: Manifest, ranges: Sequence[FileRange]) -> Iterator[None]:
            paths = {file.name: manifest.path(file.name) for file in manifest.files}
            self._link.warm(self._spec.node_id, job.request.group, paths, list(ranges))
            yield

        with prefetch_with(warm):
            yield

    def _loaded(self) -> torch.nn.Module:
        if self._model is None:
            raise ClusterError("this rank has no loaded model")
        return self._model

    def _checkpoint(self, job: Job) -> Checkpoint:
        """What the node's agent has opened; or what the driver has, with its bytes coming by a stream."""
        if job.stream is not None:
            with self._as_raywl("reading the checkpoint"):
                from raywl.readers.streamed import streamed

                spec = self._spec
                feed = RankFeed(self._link, spec.node_id, spec.node, spec.rank, job.stream)
                opened: Checkpoint = streamed(pickle.loads(job.stream.checkpoint), feed)  # noqa: S301
                return opened
        with self._as_raywl("asking the node's agent"):
            pickled = self._link.checkpoint(self._spec.node_id, job.request, job.identity, job.timeout_s)
            checkpoint: Checkpoint = pickle.loads(pickled)  # noqa: S301 (from the own node's agent)
            return checkpoint

    def run(self, call: bytes) -> bytes:
        """Calls a function with the model.

        Args:
            call: Pickled: the function, its arguments after the model, its keyword arguments.

        Returns:
            The pickled result.

        Raises:
            RaywlError: What the function raised, with rank and node; a `ClusterError` unless it was
                raywl's own.
        """
        with self._as_raywl("reading the function"):
            function, args, kwargs = pickle.loads(call)  # noqa: S301 (from the own driver)
        with self._as_raywl(getattr(function, "__name__", "the function")), self._spec.context:
            result = function(self._model, *args, **kwargs)
        with self._as_raywl("sending the result"):
            return self._link.pickle(result)

    def progress(self) -> tuple[int, int, str]:
        """Bytes done, bytes in all, phase: at the last step, for a caller that polls."""
        with self._progress_lock:
            return self._progress

    def _note_progress(self, done_bytes: int, total_bytes: int, phase: str) -> None:
        with self._progress_lock:
            old_done_bytes, _, old_phase = self._progress
            if phase != old_phase or done_bytes >= old_done_bytes:
                self._progress = (done_bytes, total_bytes, phase)

    @contextlib.contextmanager
    def _as_raywl(self, doing: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise as_raywl_error(error, self._spec.place, doing) from None
