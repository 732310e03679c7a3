"""The progress display: at most a few lines, always an end, from any number of threads."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
import threading

import pytest

from raywl.progress import make_progress

MIB = 1 << 20


@pytest.mark.parametrize("nothing", [None, False])
def test_no_progress_is_none(nothing):
    assert make_progress(nothing) is None


def test_a_callable_is_called_itself():
    calls = []
    progress = make_progress(lambda *event: calls.append(event))
    progress(1, 2, "read")
    assert calls == [(1, 2, "read")]


def test_anything_else_is_refused():
    with pytest.raises(TypeError, match="not int"):
        make_progress(3)


def test_plain_lines_are_few_and_end_with_the_whole(capsys):
    progress = make_progress(True)
    for done in range(0, 1000 * MIB + 1, MIB):
        progress(done, 1000 * MIB, "read")
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 10
    assert lines[-1] == "read: 100 % (1000.0 MiB of 1000.0 MiB)"


def test_nothing_to_do_ends_too(capsys):
    make_progress(True)(0, 0, "read")
    assert capsys.readouterr().err == "read: 100 % (0 B of 0 B)\n"


def test_a_late_thread_does_not_reopen_what_is_done(capsys):
    progress = make_progress(True)
    progress(10, 10, "read")
    progress(7, 10, "read")
    assert capsys.readouterr().err.count("\n") == 1


def test_the_same_display_serves_a_second_load(capsys):
    progress = make_progress(True)
    for _ in range(2):
        progress(0, 10, "read")
        progress(10, 10, "read")
    assert capsys.readouterr().err.count("100 %") == 2


def test_each_phase_ends(capsys):
    progress = make_progress(True)
    progress(10, 10, "stage")
    progress(4, 10, "read")
    progress(10, 10, "read")
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["stage", "read"]


def test_threads_report_at_once(capsys):
    """Whatever the order of calls, the end is shown exactly once."""
    progress = make_progress(True)
    done, lock = 0, threading.Lock()

    def work():
        nonlocal done
        for _ in range(200):
            with lock:
                done += 1
                mine = done
            progress(mine, 1600, "read")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert capsys.readouterr().err.count("100 %") == 1


def test_a_process_without_standard_error_shows_nothing(monkeypatch):
    """Services are started so."""
    monkeypatch.setattr("sys.stderr", None)
    assert make_progress(True) is None


@pytest.mark.parametrize("size", [(24, 80), (0, 0)], ids=str)
def test_a_terminal_gets_a_bar_that_closes(size):
    """A real terminal pair: the bar redraws one line, and ends it; also where nobody told how large it is."""
    script = (
        "from raywl.progress import make_progress\n"
        "p = make_progress(True)\n"
        "for done in range(0, 101, 10): p(done << 20, 100 << 20, 'read')\n"
    )
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, size)
    subprocess.run([sys.executable, "-c", script], stderr=follower, check=True, timeout=60)
    os.close(follower)
    shown = os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert "read: 100%" in shown
    assert "100M/100M" in shown
    assert shown.endswith("\n")


def test_the_display_imports_tqdm_only_for_a_bar():
    script = (
        "import sys\n"
        "from raywl.progress import make_progress\n"
        "make_progress(True)(1, 1, 'read')\n"
        "assert 'tqdm' not in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, check=True, timeout=60)
