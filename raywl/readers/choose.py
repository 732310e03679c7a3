"""Which way to read by: decided from facts alone, with every reason."""

from __future__ import annotations

from dataclasses import dataclass, field

from raywl.node.mounts import is_local, is_network
from raywl.node.prefetch import should_prefetch
from raywl.text import format_bytes, format_rate

__all__ = ["Choice", "Facts", "Probe", "choose", "needs_memory", "needs_probe", "num_threads_for"]

WARM = 0.95
"""From this part in the page cache on, the disk isn't what one waits for."""

SMALL_BYTES = 64 << 20
"""Less than this is read before anything could be gained by choosing."""

PROBED_BYTES = 4 << 30
"""From this size on, a probe of the disk costs less than a hundredth of the load."""

_MOSTLY = 0.5
_SPARSE = 0.05
"""From this part on that lies between reads and isn't wanted, the kernel's reading ahead does harm."""
_FASTER = 1.25
"""How much faster than through the page cache reads past it must be, since nothing is kept by them."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Bytes per second of a few reads of what the load wants anyway."""

    buffered_bytes_per_s: float
    direct_bytes_per_s: float | None
    """`None` where the file system has no reads past the page cache."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a choice rests on."""

    fs_type: str
    """Of the file system that the first file lies on; `""` if it can't be told."""
    wanted_bytes: int
    """What the plan reads."""
    strided_bytes: int = 0
    """Of it, what goes through scratch: column cuts, conversions."""
    shared_bytes: int = 0
    """Of it, what other ranks of this node probably read as well."""
    unwanted_bytes: int = 0
    """What lies between the reads and no rank of this node is known to want."""
    num_local_ranks: int = 1
    resident: float | None = None
    """Part of it that is in the page cache; `None` where the kernel doesn't tell."""
    available_bytes: int | None = None
    """Memory that this control group may still take; `None` where that didn't matter."""
    probe: Probe | None = None


@dataclass(slots=True)
class Choice:
    """How files are read."""

    strategy: str
    """One of raywl's words for it, never `auto`."""
    random: bool = False
    """Whether the kernel is told not to read ahead."""
    reasons: list[str] = field(default_factory=list)
    """In words, for the report."""
    warnings: list[str] = field(default_factory=list)
    """Of them, what goes against what was asked for or what the file system would call for."""

    @property
    def note(self) -> str:
        """Choice and reasons in a line."""
        return f"strategy {self.strategy}: {'; '.join(self.reasons)}"


def num_threads_for(num_cores: int, num_local_ranks: int, warm: bool) -> int:
    """Threads that read, for one of the ranks of a node.

    Out of memory more threads than cores only get in each other's way; a disk wants several reads at once.
    """
    if warm:
        return max(1, min(8, num_cores // num_local_ranks))
    return max(2, min(8, 2 * num_cores) // num_local_ranks)


def needs_memory(facts: Facts, asked: str | None) -> bool:
    """Whether the choice depends on how much memory is available."""
    if asked not in (None, "auto"):
        return asked == "prefetch"
    if is_network(facts.fs_type):
        return True
    return facts.wanted_bytes >= SMALL_BYTES and not _is_warm(facts)


def needs_probe(facts: Facts, asked: str | None) -> bool:
    """Whether the choice depends on how fast the disk is, once the other facts are known."""
    return (
        asked in (None, "auto")
        and is_local(facts.fs_type)
        and facts.wanted_bytes >= PROBED_BYTES
        and not _is_warm(facts)
        and not facts.shared_bytes
        and not _is_sparse(facts)
        and not _is_tight(facts)
    )


def choose(facts: Facts, asked: str | None) -> Choice:
    """The strategy for a load.

    Args:
        facts: What was found.
        asked: What the user asked for; `None` and `"auto"` leave it to the facts.
    """
    choice = Choice("buffered")
    if asked in (None, "auto"):
        _by_facts(facts, choice)
    else:
        assert asked is not None
        choice.strategy = asked
        if asked == "prefetch":
            assert facts.available_bytes is not None
            decision = should_prefetch(facts.fs_type, facts.wanted_bytes, facts.available_bytes, True)
            choice.reasons.append(decision.reason)
            if decision.warn:
                choice.warnings.append(decision.reason)
        else:
            choice.reasons.append("it was asked for")
    if choice.strategy in ("buffered", "prefetch") and _is_sparse(facts) and is_local(facts.fs_type):
        choice.random = True
        choice.reasons.append(
            f"no reading ahead, since {format_bytes(facts.unwanted_bytes)} between the reads aren't wanted"
        )
    return choice


def _by_facts(facts: Facts, choice: Choice) -> None:
    where = f"on {facts.fs_type}" if facts.fs_type else "on an unknown file system"
    if is_network(facts.fs_type):
        assert facts.available_bytes is not None
        decision = should_prefetch(facts.fs_type, facts.wanted_bytes, facts.available_bytes)
        choice.strategy = "prefetch" if decision.on else "buffered"
        choice.reasons.append(decision.reason)
        if decision.warn:
            choice.warnings.append(decision.reason)
        return
    choice.reasons.append(where)
    if facts.wanted_bytes < SMALL_BYTES:
        choice.reasons.append(f"only {format_bytes(facts.wanted_bytes)} to read")
        return
    choice.reasons.append(_residency(facts))
    if not is_local(facts.fs_type):
        choice.reasons.append("files there are neither mapped nor read past the page cache")
        return
    if _is_warm(facts):
        _when_warm(facts, choice)
    else:
        _when_cold(facts, choice)


def _when_warm(facts: Facts, choice: Choice) -> None:
    if facts.strided_bytes > _MOSTLY * facts.wanted_bytes:
        choice.strategy = "mmap"
        choice.reasons.append("most of it is strided, which is copied faster out of a mapping")
    else:
        choice.reasons.append("most of it goes straight into parameters")


def _when_cold(facts: Facts, choice: Choice) -> None:
    others = f"{facts.num_local_ranks - 1} other ranks of this node"
    if facts.shared_bytes:
        choice.reasons.append(f"{format_bytes(facts.shared_bytes)} of it are for {others} too")
        return
    if _is_tight(facts):
        assert facts.available_bytes is not None
        choice.strategy = "direct"
        choice.reasons.append(
            f"the page cache has no room for it ({format_bytes(facts.wanted_bytes)} to read, "
            f"{format_bytes(facts.available_bytes)} of memory available)"
        )
        return
    probe = facts.probe
    if probe is None:
        choice.reasons.append("the page cache has room for it")
        return
    direct = probe.direct_bytes_per_s
    told = f"a probe read {format_rate(probe.buffered_bytes_per_s, 1)} through the page cache"
    told += ", past it nothing" if direct is None else f", {format_rate(direct, 1)} past it"
    choice.reasons.append(told)
    if direct is not None and direct >= _FASTER * probe.buffered_bytes_per_s:
        choice.strategy = "direct"


def _residency(facts: Facts) -> str:
    if facts.resident is None:
        return "what of it is in the page cache can't be seen"
    return f"{facts.resident:.0%} of {format_bytes(facts.wanted_bytes)} in the page cache"


def _is_warm(facts: Facts) -> bool:
    return facts.resident is not None and facts.resident >= WARM


def _is_sparse(facts: Facts) -> bool:
    return facts.unwanted_bytes > _SPARSE * facts.wanted_bytes


def _is_tight(facts: Facts) -> bool:
    return facts.available_bytes is not None and facts.wanted_bytes > facts.available_bytes
