"""What a load did, and when: sums, the trace, and the page."""

from __future__ import annotations

import json
import pickle
import threading

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import raywl
from raywl import timeline as timeline_module
from raywl.report import GroupReport
from raywl.timeline import Span, Timeline, trace

from .test_report import EVIL, Page, a_load


def a_timeline() -> Timeline:
    """Two threads: one reads, the other copies as well and waits."""
    timeline = Timeline(started_at=100.0)
    timeline.note_phase("open")
    timeline.add(Span(0, "a", 0, 100, 0.0, 0.5, 0.0, 0.0))
    timeline.add(Span(1, f"{EVIL}", 50, 300, 0.1, 0.1, 0.2, 0.1))
    timeline.add(Span(0, "a", 100, 100, 0.5, 0.5, 0.0, 0.0))
    timeline.note_phase("read")
    return timeline


def test_times_are_summed_up():
    timeline = a_timeline()
    assert timeline.parts == pytest.approx((1.1, 0.2, 0.1))
    assert timeline.files["a"].nbytes == 200
    assert timeline.files["a"].seconds == pytest.approx(1.0)
    assert [file for file, _ in timeline.slowest_files()] == ["a", EVIL]
    assert timeline.slowest_files(1)[0][0] == "a"
    open_phase, read_phase = timeline.phases
    assert open_phase.at_s == 0
    assert read_phase.at_s == pytest.approx(open_phase.seconds)


def test_wall_time_is_shared_out_as_threads_spent_theirs():
    """The parts sum up to it; a thread without anything to do waits."""
    timeline = a_timeline()
    parts = timeline.parts_of(1.0, 2, (0.0, 0.0, 0.0))
    assert parts == pytest.approx({"read": 0.55, "copy": 0.1, "wait": 0.35})
    assert timeline.parts_of(1.0, 2, timeline.parts) == {"read": 0.0, "copy": 0.0, "wait": 1.0}
    assert sum(timeline.parts_of(0.1, 2, (0.0, 0.0, 0.0)).values()) == pytest.approx(0.1)
    assert Timeline().parts_of(0.0, 1, (0.0, 0.0, 0.0)) == {"read": 0.0, "copy": 0.0, "wait": 0.0}


def test_many_reads_take_bounded_memory(monkeypatch):
    """Those beyond the limit only count."""
    monkeypatch.setattr(timeline_module, "MAX_SPANS", 100)
    timeline = Timeline()

    def add():
        for _ in range(500):
            timeline.add(Span(0, "a", 0, 1, 0.0, 1.0, 0.0, 0.0))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(timeline.spans) == 100
    assert timeline.num_left_out == 1900
    assert timeline.read_s == 2000
    assert timeline.files["a"].nbytes == 2000


def test_a_trace_has_what_the_format_asks_for():
    """Complete events in microseconds, processes and threads by name, ranks on one clock."""
    late = a_timeline()
    late.started_at = 100.25
    events = json.loads(trace({"rank 0": (0, a_timeline()), "rank 1": (1, late)}))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {(p, t): n for p in (0, 1) for t, n in enumerate(("phases", "reader 0", "reader 1"))}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0", "rank 1"]
    reads = [e for e in events if e.get("cat") == "read"]
    assert all(e["ph"] == "X" and e["dur"] > 0 for e in reads)
    assert reads[1]["name"] == EVIL
    assert reads[1]["ts"] == pytest.approx(1e5)
    assert reads[1]["dur"] == pytest.approx(4e5)
    assert reads[1]["args"] == pytest.approx(
        {"start": 50, "bytes": 300, "read_ms": 100.0, "copy_ms": 200.0, "wait_ms": 100.0}
    )
    assert reads[3]["ts"] - reads[0]["ts"] == pytest.approx(2.5e5)
    assert [e["name"] for e in events if e.get("cat") == "phase"] == ["open", "read"] * 2


def test_a_page_shows_it(tmp_path):
    """A row for each thread, what was slow, and no name that is more than text."""
    a_load(timeline=a_timeline()).to_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert text.count("<svg") == 1
    assert "Slowest files" in page.text
    assert EVIL in page.text
    assert "script" not in page.tags
    # Two phases; one part of each read of the first thread, three of the other's.
    assert text.count("<rect") == 2 + 2 + 3


def test_a_page_stays_small(tmp_path):
    """Reads that are too short to be seen are drawn as one, however many ranks there are."""
    timeline = Timeline(started_at=100.0)
    for at in range(20_000):
        timeline.add(Span(at % 8, "a", at, 1, at * 1e-4, 1e-5, 1e-5, 1e-5))
    ranks = [a_load(0, timeline=timeline, seconds=2.0) for _ in range(8)]
    GroupReport("ref", "identity", ranks).to_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert text.count("<svg") == 8
    assert 1000 < text.count("<rect") < 20_000
    assert "reads from a on" in text


class Columns(nn.Module):
    def __init__(self):
        super().__init__()
        self.whole = nn.Parameter(torch.empty(600, 1000))
        self.cut = nn.Parameter(torch.empty(600, 500))


def test_a_load_has_one(tmp_path):
    """Every read once, with its bytes; phases sum up to the whole; nothing is lost by pickling."""
    save_file({"whole": torch.ones(600, 1000), "cut": torch.ones(600, 1000)}, tmp_path / "model.safetensors")
    report = raywl.load_into(
        Columns(),
        tmp_path,
        shards={"cut": raywl.Shard(1)},
        parallel=raywl.ParallelContext(tp_size=2),
        strategy="buffered",
    )
    assert sum(span.nbytes for span in report.timeline.spans) == report.bytes_read
    assert len(report.timeline.spans) == len(report.plan.reads)
    assert list(report.phases) == ["open", "plan", "read", "copy", "wait", "post"]
    assert sum(report.phases.values()) == pytest.approx(report.seconds, rel=0.01)
    assert all(seconds >= 0 for seconds in report.phases.values())
    assert report.timeline.copy_s > 0
    assert report.read_bytes_per_s > 0
    assert report.to_dict()["slowest_files"][0]["nbytes"] == report.bytes_read
    assert pickle.loads(pickle.dumps(report)) == report
    report.to_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e.get("cat") == "phase"] == ["open", "plan", "read", "post"]


def test_nothing_read_takes_no_time(tmp_path):
    save_file({"whole": torch.ones(0, 4)}, tmp_path / "model.safetensors")
    model = nn.Module()
    model.whole = nn.Parameter(torch.empty(0, 4))
    report = raywl.load_into(model, tmp_path)
    assert report.read_bytes_per_s is None
    assert report.limit_ratio is None
    report.to_trace(tmp_path / "trace.json")
    report.to_html(tmp_path / "page.html")
