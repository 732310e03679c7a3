"""What happened while a checkpoint was staged."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from raywl import html
from raywl.text import format_bytes, format_rate, format_seconds

__all__ = ["StageReport", "StagedNode"]

_HEADERS = ("node", "state", "has", "from the source", "from nodes", "to nodes", "peak in the store")


@dataclass(slots=True)
class StagedNode:
    """One node's part."""

    node: str
    """What the node is called."""
    node_id: str
    state: str
    """`"finished"`, `"lost"`; or what it was when the report was made."""
    has_bytes: int = 0
    """Bytes of the checkpoint that are on its disk; or that passed, of a stream."""
    fetched_bytes: int = 0
    """From the source."""
    received_bytes: int = 0
    """From other nodes."""
    sent_bytes: int = 0
    """To other nodes."""
    peak_store_bytes: int = 0
    """The most that it had in the object store at once."""
    shares_with: str | None = None
    """The node that filled the cache folder which both have."""
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class StageReport:
    """A staging: where the bytes came from, and where they are."""

    ref: str
    """The checkpoint as the user named it."""
    identity: str
    """The checkpoint's identity, the same on every node."""
    mode: str
    """`"cache"` or `"stream"`."""
    kind: str = "local"
    """What its source is: `hub`, a store's protocol, `local`."""
    nbytes: int = 0
    """Bytes of all files of the checkpoint."""
    nodes: list[StagedNode] = field(default_factory=list)
    seconds: float = 0.0
    """Wall time of the whole call."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase."""
    notes: list[str] = field(default_factory=list)
    """What was chosen automatically, and why; and what went wrong on the way."""

    @property
    def bytes_from_source(self) -> int:
        """Bytes that left the source, over all nodes."""
        return sum(node.fetched_bytes for node in self.nodes)

    @property
    def bytes_between_nodes(self) -> int:
        """Bytes that nodes got from each other."""
        return sum(node.received_bytes for node in self.nodes)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {
            **asdict(self),
            "bytes_from_source": self.bytes_from_source,
            "bytes_between_nodes": self.bytes_between_nodes,
        }

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a self-contained page; an earlier one is replaced whole.

        Raises:
            OSError: The folder doesn't exist or can't be written to.
        """
        sections = [
            html.section("Nodes", self._table()),
            html.section("Phases", html.bars({"stage": self.phases})),
        ]
        notes = [*self.notes, *(f"{node.node}: {note}" for node in self.nodes for note in node.notes)]
        if notes:
            sections.append(html.section("Notes", _list(notes)))
        html.write_page(path, html.page(f"Staging of {self.ref}", [self._summary(), *sections]))

    def rows(self) -> list[list[str]]:
        """The nodes as text, under `headers`."""
        return [
            [
                node.node,
                node.state if node.shares_with is None else f"{node.state} (folder of {node.shares_with})",
                *map(
                    format_bytes,
                    (
                        node.has_bytes,
                        node.fetched_bytes,
                        node.received_bytes,
                        node.sent_bytes,
                        node.peak_store_bytes,
                    ),
                ),
            ]
            for node in self.nodes
        ]

    @property
    def headers(self) -> tuple[str, ...]:
        """Titles of the columns of `rows`."""
        return _HEADERS

    @property
    def headline(self) -> str:
        """All in one line."""
        rate = format_rate(self.nbytes, self.seconds)
        return (
            f"{self.ref}: {format_bytes(self.nbytes)} on {len(self.nodes)} "
            f"{'node' if len(self.nodes) == 1 else 'nodes'} in {format_seconds(self.seconds)} ({rate} each), "
            f"{format_bytes(self.bytes_from_source)} from the source, "
            f"{format_bytes(self.bytes_between_nodes)} between nodes"
        )

    def _repr_html_(self) -> str:
        return f"<div>{self._summary()}{self._table()}</div>"

    def _summary(self) -> str:
        return _list([self.headline, f"identity {self.identity}"])

    def _table(self) -> str:
        return html.table(_HEADERS, self.rows(), numbers_from=2)


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"
