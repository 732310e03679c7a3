"""What `raywl bench reload` measures: new weights into a live model's parameters, in place."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from raywl.bench.destinations import (
    TOUCHED,
    Work,
    bytes_of_model,
    digest,
    touched_bytes,
    touched_model,
)
from raywl.loading import ReloadReport

__all__ = ["CopyOnly", "ReloadInto"]

_BLOCK_BYTES = 16 << 20


class ReloadInto:
    """`raywl.reload_into`, from opening the checkpoint on, with its check, into a model that was loaded."""

    files: Sequence[str] = ()

    def prepare(self, work: Work) -> None:
        """Loads the model, and spoils its values."""
        import raywl

        self._work = work
        self._model = touched_model(work)
        raywl.load_into(
            self._model, work.ref, parallel=work.context, shards=work.specs(), progress=False, **work.source
        )
        self._addresses = self._where()
        for _, view in bytes_of_model(self._model):
            view.fill_(TOUCHED)

    def run(self) -> int:
        """Reloads; returns the bytes asked of the files."""
        import raywl

        report: ReloadReport = raywl.reload_into(
            self._model,
            self._work.ref,
            parallel=self._work.context,
            shards=self._work.specs(),
            progress=False,
            **self._work.source,
        )
        return report.bytes_read

    def digest(self) -> str | None:
        """Of the parameters.

        Raises:
            RuntimeError: One of them has moved.
        """
        if self._where() != self._addresses:
            raise RuntimeError("parameters are at other addresses than before")
        return digest(dict(bytes_of_model(self._model)))

    def _where(self) -> dict[str, int]:
        return {name: parameter.data_ptr() for name, parameter in self._model.named_parameters()}


class CopyOnly:
    """The limit: as many bytes copied from memory to memory in large blocks, and nothing else."""

    files: Sequence[str] = ()

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def prepare(self, work: Work) -> None:
        """Touches both memories."""
        num_bytes = sum(view.numel() for _, view in bytes_of_model(touched_model(work)))
        self._from, self._to = touched_bytes(num_bytes).numpy(), touched_bytes(num_bytes).numpy()

    def run(self) -> int:
        """Copies; returns the bytes."""

        def copy(start: int) -> None:
            self._to[start : start + _BLOCK_BYTES] = self._from[start : start + _BLOCK_BYTES]

        with ThreadPoolExecutor(self._num_threads) as pool:
            for _ in pool.map(copy, range(0, len(self._to), _BLOCK_BYTES)):
                pass
        return len(self._to)

    def digest(self) -> str | None:
        """There is nothing to compare."""
        return None
