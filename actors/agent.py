"""The actor that acts for one node."""

from __future__ import annotations

import pickle
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from raywl.actors.failures import Place, as_raywl_error
from raywl.actors.names import Hello, mine
from raywl.coordination import Beat
from raywl.errors import CheckpointError

__all__ = ["AgentLink", "NodeAgent", "Opened", "SourceRequest"]

_ALONE_S = 60.0
_FIRST_PAUSE_S = 1.0


class AgentLink(Protocol):
    """What an agent asks of the cluster."""

    def beat(self, node_id: str) -> Beat:
        """Tells the coordinator that the agent lives; raises when there is none."""

    def end_this_actor(self) -> None:
        """Ends the calling actor for good."""


@dataclass(frozen=True)
class SourceRequest:
    """A checkpoint as a node is asked to open it: by name, never as another node's path."""

    group: str
    """The group that wants it."""
    ref: str
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    """Keyword arguments of `open_checkpoint`; may hold secrets, so they aren't shown."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What a node found."""

    identity: str
    num_tensors: int
    nbytes: int


class NodeAgent:
    """Opens checkpoints on its node, once for all ranks there.

    One per node, detached, pinned to it, named by raywl's version, protocol and the node's id; every
    method runs in its process, several at a time in threads.

    1. A launch makes it, or finds it (`get_if_exists`), and compares versions by `hello`.
    2. `open` reads the checkpoint's headers here; the driver compares the identities of all nodes.
    3. Each rank of the node asks for the same checkpoint by `checkpoint`.
    4. `close` forgets it. All of these may be repeated.
    5. A thread asks the coordinator by heartbeat whether the agent is still needed, and ends it when
       nothing has needed it for the idle time, or when there has been no coordinator for a minute.
    6. After a crash Ray starts it again on the same node, empty: what it forgot is read from disk again.
    """

    def __init__(self, node_id: str, label: str, link: AgentLink) -> None:
        """Runs in the agent's process.

        Args:
            node_id: The node that it is pinned to.
            label: What to call that node in messages.
            link: Its way to the cluster.
        """
        self._node_id = node_id
        self._place = Place(label)
        self._link = link
        self._lock = threading.Lock()
        self._opening: dict[str, threading.Lock] = {}
        self._opened: dict[str, tuple[Opened, bytes]] = {}
        threading.Thread(target=self._heartbeats, name="raywl-agent", daemon=True).start()

    def hello(self) -> Hello:
        """Version and protocol."""
        return mine()

    def open(self, request: SourceRequest) -> Opened:
        """Opens the checkpoint on this node; a second call for the group answers from memory.

        Raises:
            RaywlError: As `open_checkpoint`, with this node's name.
        """
        return self._open(request)[0]

    def checkpoint(self, request: SourceRequest, identity: str) -> bytes:
        """The pickled `Checkpoint`, for ranks of this node.

        Args:
            request: As given to `open`.
            identity: What the nodes agreed on.

        Raises:
            CheckpointError: It has changed on this node since.
        """
        opened, pickled = self._open(request)
        if opened.identity != identity:
            raise CheckpointError(
                request.ref,
                None,
                f"changed while it was loaded: it was {identity}, now it is {opened.identity}",
            ).at(str(self._place))
        return pickled

    def close(self, group: str) -> None:
        """Forgets what a group had opened."""
        with self._lock:
            self._opened.pop(group, None)
            self._opening.pop(group, None)

    def _open(self, request: SourceRequest) -> tuple[Opened, bytes]:
        with self._lock:
            lock = self._opening.setdefault(request.group, threading.Lock())
        with lock:
            known = self._opened.get(request.group)
            if known is not None:
                return known
            from raywl.opening import open_checkpoint

            try:
                checkpoint = open_checkpoint(request.ref, **request.options)
            except Exception as error:
                raise as_raywl_error(error, self._place, "open_checkpoint") from None
            opened = Opened(checkpoint.identity, len(checkpoint.tensors), checkpoint.nbytes)
            self._opened[request.group] = known = (opened, pickle.dumps(checkpoint))
            return known

    def _forget_all_but(self, groups: tuple[str, ...]) -> None:
        # Of drivers that died. Where the coordinator is too new to know a group, its ranks' next
        # question opens the checkpoint again.
        with self._lock:
            for group in [name for name in self._opened if name not in groups]:
                self._opened.pop(group)
                self._opening.pop(group, None)

    def _heartbeats(self) -> None:
        pause, pause_s, last_answer_s = threading.Event(), _FIRST_PAUSE_S, time.monotonic()
        while True:
            try:
                answer = self._link.beat(self._node_id)
            except Exception:
                # No coordinator: it may be starting again. Without one, nobody can need this agent.
                if time.monotonic() - last_answer_s > _ALONE_S:
                    break
            else:
                if answer.retire:
                    break
                pause_s, last_answer_s = answer.next_beat_s, time.monotonic()
                self._forget_all_but(answer.groups)
            pause.wait(pause_s)
        self._link.end_this_actor()
