"""Where a command's words go: its result to standard output, everything else to standard error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from raywl.progress import Progress, make_progress
from raywl.text import plain_table

__all__ = ["Output", "flush_stdout", "open_output"]


class Output:
    """What a subcommand prints with."""

    def __init__(self, result: TextIO, *, as_json: bool, quiet: bool) -> None:
        self._result = result
        self.as_json = as_json
        """Whether the result is one JSON object, and text about it is left out."""
        self.quiet = quiet
        """Whether progress is left out."""

    def progress(self) -> Progress | None:
        """The display of progress on standard error, or `None` with `--quiet`."""
        return make_progress(not self.quiet)

    def say(self, line: str) -> None:
        """One line about what is going on, to standard error; none with `--quiet`."""
        if not self.quiet:
            print(line, file=sys.stderr, flush=True)

    def text(self, line: str = "") -> None:
        """One line of the result; none with `--json`."""
        if not self.as_json:
            self._write(f"{line}\n")

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
        """A table of the result; none with `--json`. On a terminal `rich` draws it, if installed."""
        if self.as_json:
            return
        if title:
            self._write(f"\n{title}\n")
        if not (self._result.isatty() and self._rich_table(headers, rows)):
            self._write(plain_table(headers, rows) + "\n")

    def json(self, value: Mapping[str, Any]) -> None:
        """The result as one JSON object on one line; nothing without `--json`."""
        if self.as_json:
            self._write(json.dumps(value) + "\n")

    def _rich_table(self, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
        try:
            from rich import box
            from rich.console import Console
            from rich.table import Table
            from rich.text import Text
        except ImportError:
            return False
        drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column, header in enumerate(headers):
            drawn.add_column(Text(header), justify="left" if column == 0 else "right", overflow="fold")
        for row in rows:
            # Text, since rich would read `[...]` in a name as its own markup.
            drawn.add_row(*map(Text, row))
        console = Console(file=self._result)
        with console.capture() as captured:
            console.print(drawn)
        self._write(captured.get())
        return True

    def _write(self, text: str) -> None:
        try:
            self._result.write(text)
            self._result.flush()
        except BrokenPipeError:
            # Whoever read the result has seen enough (`| head`): no failure of the command.
            _point_at_nothing(self._result)


def flush_stdout() -> None:
    """Writes out what was printed; a reader that is gone is no failure."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _point_at_nothing(sys.stdout)


def _point_at_nothing(stream: TextIO) -> None:
    # What is still buffered would raise again when the stream is closed.
    with open(os.devnull, "w") as devnull:
        os.dup2(devnull.fileno(), stream.fileno())


@contextmanager
def open_output(*, as_json: bool, quiet: bool) -> Iterator[Output]:
    """Keeps standard output for the result alone while a command runs.

    Whatever else prints there (a model factory, native code, the workers of a cluster whose logs Ray
    shows) goes to standard error, so that `--json` is one object and nothing else.
    """
    stdout = sys.stdout
    stdout.flush()
    try:
        is_first = stdout.fileno() == 1
    except (OSError, ValueError):
        is_first = False
    if not is_first:
        # Replaced by a caller in this process, who reads it himself.
        sys.stdout = sys.stderr
        try:
            yield Output(stdout, as_json=as_json, quiet=quiet)
        finally:
            sys.stdout = stdout
        return
    kept = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        with open(kept, "w", encoding=stdout.encoding, errors="backslashreplace", closefd=False) as result:
            yield Output(result, as_json=as_json, quiet=quiet)
    finally:
        sys.stdout = stdout
        os.dup2(kept, 1)
        os.close(kept)
