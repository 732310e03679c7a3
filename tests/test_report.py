"""Reports: JSON values, pages that stand alone, and names that are only ever text."""

from __future__ import annotations

import json
import os
import pickle
import re
from html.parser import HTMLParser

import pytest

from raywl.report import GroupReport, LoadReport
from raywl.types import ParallelContext

EVIL = "<script>alert('x')</script>&\"'"
VOID = {"meta", "br", "i"}


def a_load(rank: int = 0, **values) -> LoadReport:
    return LoadReport(
        ref=EVIL,
        identity="local:abc",
        context=ParallelContext(tp_rank=rank, tp_size=2),
        **{
            "loaded": [EVIL, "b"],
            "missing": [f"missing {EVIL}"],
            "unexpected": [f"unexpected {EVIL}"],
            "skipped": {f"skipped {EVIL}": f"why {EVIL}"},
            "partial": {f"partial {EVIL}": f"rest {EVIL}"},
            "notes": [f"note {EVIL}"],
            "bytes_read": 3 << 20,
            "bytes_loaded": 2 << 20,
            "bytes_by_file": {f"{EVIL}.safetensors": 3 << 20},
            "seconds": 0.5,
            "phases": {"open": 0.1, "plan": 0.1, EVIL: 0.3},
            "node": EVIL,
            **values,
        },
    )


def a_group() -> GroupReport:
    return GroupReport(
        EVIL,
        "local:abc",
        [a_load(0), a_load(1, seconds=0.0, phases={})],
        [EVIL],
        2.0,
        {"connect": 1.0, "load": 1.0},
        [EVIL],
    )


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails on a tag that isn't closed in turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID - {"i"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("make", [a_load, a_group], ids=["load", "group"])
def test_a_page_stands_alone(make, tmp_path):
    """No script, nothing fetched, whatever names the checkpoint has; light and dark."""
    path = tmp_path / "report.html"
    make().to_html(path)
    text = path.read_text()
    page = Page(text)
    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "object", "base", "form"})
    assert page.attributes.isdisjoint({"src", "href", "srcset", "action"})
    assert not any(name.startswith("on") for name in page.attributes)
    assert not re.search(r"url\(|@import|https?:|//[a-z]", text)
    assert "prefers-color-scheme: dark" in text
    for shown in ("missing ", "unexpected ", "skipped ", "why ", "partial ", "rest ", "note "):
        if make is a_load or shown not in ("unexpected ",):
            assert f"{shown}{EVIL}" in page.text
    assert f"{EVIL}.safetensors" in page.text


@pytest.mark.parametrize("make", [a_load, a_group], ids=["load", "group"])
def test_a_notebook_shows_a_fragment(make):
    text = make()._repr_html_()
    page = Page(text)
    assert "script" not in page.tags
    assert "html" not in page.tags
    assert "MiB" in page.text


@pytest.mark.parametrize("make", [a_load, a_group], ids=["load", "group"])
def test_json_and_pickle_keep_everything(make):
    report = make()
    values = json.loads(json.dumps(report.to_dict()))
    assert values["bytes_read"] == report.bytes_read
    assert values["missing"] == report.missing
    assert pickle.loads(pickle.dumps(report)) == report


def test_a_group_adds_its_ranks_up():
    values = a_group().to_dict()
    assert values["bytes_read"] == 6 << 20
    assert values["bytes_loaded"] == 4 << 20
    assert [rank["context"]["tp_rank"] for rank in values["ranks"]] == [0, 1]


def test_an_empty_load_has_a_page(tmp_path):
    """Nothing read and no time taken: no division by it."""
    empty = LoadReport("ref", "identity", ParallelContext())
    empty.to_html(tmp_path / "empty.html")
    assert "No time was recorded" in (tmp_path / "empty.html").read_text()
    assert empty._repr_html_()


def test_names_that_are_no_unicode_are_written(tmp_path):
    a_load(loaded=["\udcff"]).to_html(tmp_path / "page.html")
    assert "\\udcff" in (tmp_path / "page.html").read_text()


def test_a_page_is_replaced_whole(tmp_path, monkeypatch):
    """A failure while writing leaves the old page, and nothing else, in the folder."""
    path = tmp_path / "report.html"
    path.write_text("old")

    def fail(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        a_load().to_html(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.html"]


def test_a_page_is_readable_as_other_files_are(tmp_path):
    a_load().to_html(tmp_path / "report.html")
    (tmp_path / "other").touch()
    assert (tmp_path / "report.html").stat().st_mode == (tmp_path / "other").stat().st_mode
