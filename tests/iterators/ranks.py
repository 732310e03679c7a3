"""Ranks in processes of their own, over gloo on this machine: what does one of them do to the others?"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    ["fastsafetensors", "runai_model_streamer", "safetensors.torch", "raywl.weight_utils"]
)
_IN_TIME_S = 150.0
"""For a whole scenario on a busy machine; what waits for a rank that is gone waits for 30 minutes."""


@dataclass
class Outcome:
    """How a rank ended."""

    value: Any = None
    """What its function gave."""
    error: BaseException | None = None
    """What it raised; raywl's own errors arrive as they are."""
    kind: str = ""
    """The class of the error; `"killed"` for a rank that is gone."""
    warnings: list[str] = field(default_factory=list)


def kill_me() -> None:
    """Ends this process as the system does that needs its memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    env: dict[str, str] | None = None,
    store: str = "apart",
) -> list[Outcome]:
    """Runs `function(rank, *args)` on ranks with a default process group.

    A rank that has ended stays alive until all have, as an actor of a cluster would: it is not its exit that
    ends the others.

    Args:
        function: Importable by name.
        size: Number of ranks.
        args: Passed on.
        env: For all of them.
        store: `"apart"`: the group's store is in this process, as with an agent that starts ranks;
            `"rank 0"`: it is in rank 0, and gone with it.
    """
    import torch.distributed as dist

    holder = None
    if store == "apart":
        holder = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [_PROCESSES.Pipe() for _ in range(size)]
    ranks = []
    try:
        for rank, (_, theirs) in enumerate(pipes):
            process = _PROCESSES.Process(
                target=_rank, args=(theirs, rank, size, holder and holder.port, env or {}, function, args)
            )
            process.start()
            ranks.append(process)
            theirs.close()
        if holder is None:
            port = pipes[0][0].recv()
            for ours, _ in pipes[1:]:
                ours.send(port)
        deadline = time.monotonic() + _IN_TIME_S
        return [_outcome(ours, deadline) for ours, _ in pipes]
    finally:
        for ours, _ in pipes:
            ours.close()
        for process in ranks:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _outcome(ours: Connection, deadline: float) -> Outcome:
    assert ours.poll(max(0.0, deadline - time.monotonic())), "a rank hangs"
    try:
        return ours.recv()
    except EOFError:
        return Outcome(kind="killed")


def _rank(
    pipe: Connection, rank: int, size: int, port: int | None, env: dict[str, str], function: Any, args: Any
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(env, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    if port is not None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
    elif rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipe.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", pipe.recv(), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    if port is not None:
        # One that ends at once must not do so while others still connect to it.
        store.set(f"connected/{rank}", "")
        store.wait([f"connected/{other}" for other in range(size)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            outcome = Outcome(function(rank, *args))
        except BaseException as error:
            outcome = Outcome(error=error, kind=type(error).__name__)
    outcome.warnings = [str(row.message) for row in caught]
    if outcome.error is not None:
        # Its frames hold what the rank was at, which may be what the others wait for.
        outcome.error.__traceback__ = None
    pipe.send(outcome)
    # Until the test has heard from all ranks, or is gone.
    with contextlib.suppress(EOFError):
        pipe.recv()
    os._exit(0)
