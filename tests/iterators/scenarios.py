"""What single ranks do in tests of iterators; each function runs in a process of its own, as `rank`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from raywl import weight_utils
from raywl.iterators import together as module
from raywl.iterators.together import Ranks, together
from tests.iterators.ranks import kill_me

Row = tuple[str, str, list[int], str, list[int] | None]


def row(name: str, tensor: torch.Tensor) -> Row:
    """Name, dtype, shape, device and bytes of a tensor; no bytes on `meta`."""
    raw = None
    if tensor.device.type != "meta":
        raw = tensor.reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []
    return name, str(tensor.dtype), list(tensor.shape), tensor.device.type, raw


def line(rank: int, what: str, how: str) -> Any:
    """Ranks that talk with each other, and one of which does as `what` and `how` say."""
    # Large tensors go in pieces; these are of 12 bytes.
    module._PIECE_BYTES = 5
    if how == "over a GPU's group":
        dist.get_backend_config = lambda group: "cuda:nccl"
    with together(dist.group.WORLD, "group") as ranks:
        assert isinstance(ranks, Ranks)
        for number in range(20):
            if rank == {"first": 0, "last": ranks.size - 1}.get(what) and number == 7:
                if how == "raises":
                    raise KeyError("in the middle")
                if how == "dies":
                    kill_me()
                if how == "returns":
                    return number
            told = ranks.gather({"rank": rank, "text": "é" * rank})
            assert told == [{"rank": at, "text": "é" * at} for at in range(ranks.size)]
            assert ranks.from_reader([number, rank]) == [number, 0]
            tensor = torch.full((3, 2), rank + number, dtype=torch.bfloat16)
            ranks.tensor_from_reader(tensor)
            assert (tensor == number).all()
            ranks.step(number)
        return "done"


def meet(rank: int, victim: int) -> None:
    """One rank is gone before the others begin."""
    if rank == victim:
        kill_me()
    together(dist.group.WORLD, "group")


def line_again(rank: int, times: int) -> int:
    """Many lines, one after the other."""
    for number in range(times):
        with together(dist.group.WORLD, "group") as ranks:
            assert ranks is not None
            assert ranks.gather(number) == [number] * ranks.size
    return times


def is_shared(name: str) -> bool:
    return "table" in name


def runai(rank: int, files: dict[int, list[str]], options: dict[str, Any]) -> list[Row]:
    """Iterates through runai-model-streamer.

    Options:
        own_env: By rank, beside that of all.
        lacks: Ranks without the library.
        cpu: Whether the world is given as `cpu_weights_group`.
        shared: By rank, names that are said to be shared; `is_shared` without it.
        at: `{(rank, name): what}`: what a rank does once it has a tensor.
    """
    os.environ.update(options.get("own_env", {}).get(rank, {}))
    if rank in options.get("lacks", ()):
        sys.modules["runai_model_streamer"] = None  # type: ignore[assignment]
    shared = options.get("shared", {}).get(rank)
    iterator = weight_utils.runai_safetensors_weights_iterator(
        files.get(rank, files.get(-1)),
        False,
        is_distributed=options.get("distributed", False),
        cpu_weights_group=dist.group.WORLD if options.get("cpu") else None,
        is_shared_cpu_weight=is_shared if shared is None else lambda name: name in shared,
    )
    return _consume(rank, iterator, options.get("at", {}))


def _consume(rank: int, iterator: Iterator[tuple[str, torch.Tensor]], at: dict[Any, str]) -> list[Row]:
    rows = []
    for name, tensor in iterator:
        rows.append(row(name, tensor))
        what, _, argument = at.get((rank, name), "").partition(" ")
        if what == "die":
            kill_me()
        elif what == "raise":
            raise ArithmeticError("the consumer failed")
        elif what == "stop":
            break
        elif what == "cut":
            os.truncate(argument, os.path.getsize(argument) - 4)
        elif what == "scribble":
            tensor.zero_()
    return rows


def runai_alone(rank: int, path: str, group: str) -> list[str]:
    """Only rank 1 iterates, with a `process_group` that leaves the other out."""
    pair = dist.new_group([1, 2]) if group == "pair" else None
    if rank == 0 or (group == "none" and rank == 2):
        return []
    iterator = weight_utils.runai_safetensors_weights_iterator(
        [path], False, is_distributed=True, process_group=pair
    )
    return [name for name, _ in iterator]


def shares_reads(rank: int, files: list[str]) -> tuple[list[Row], list[bool]]:
    """Which of the library's reads were shared between the ranks."""
    from runai_model_streamer import SafetensorsStreamer

    shared: list[bool] = []
    real: Callable[..., Any] = SafetensorsStreamer.get_tensors

    def get_tensors(self: Any) -> Any:
        shared.append(self.file_streamer.is_distributed)
        return real(self)

    SafetensorsStreamer.get_tensors = get_tensors
    iterator = weight_utils.runai_safetensors_weights_iterator(files, False, is_distributed=True)
    return _consume(rank, iterator, {}), shared


def fastsafe(rank: int, files: list[str]) -> tuple[list[str], list[tuple[str, bool]]]:
    """Rank 1 iterates through fastsafetensors, on a machine that has a GPU as far as it sees."""
    import fastsafetensors

    from tests.iterators.test_fastsafe import OnACard

    OnACard.take_the_place()
    fastsafetensors.SafeTensorsFileLoader = OnACard
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    if rank == 0:
        return [], []
    return [name for name, _ in weight_utils.fastsafetensors_weights_iterator(files, False)], OnACard.made


def instant(
    rank: int, files: dict[int, list[str]], ids: dict[int, list[int]], at: dict[Any, str]
) -> tuple[list[str], list[bool]]:
    """Iterates with a stand-in for instanttensor; the names, and which files were read with the others.

    Args:
        rank: This one.
        files: By rank, -1 for all others.
        ids: Local experts by rank.
        at: As for `runai`.
    """
    from tests.iterators.test_instant import put_in_place

    opened = put_in_place()
    iterator = weight_utils.instanttensor_weights_iterator(files.get(rank, files[-1]), False, ids.get(rank))
    names = [name for name, *_ in _consume(rank, iterator, at)]
    return names, [call["group"] is not None for call in opened.calls]
