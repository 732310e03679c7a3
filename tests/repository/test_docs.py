"""The docs are true: their code runs as it stands, and their links lead somewhere."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hub_server import HubServer
from tests.modelscope_server import ModelScopeServer
from tests.repository.imports import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = ("python", "console")
SHOWN = ("text", "mermaid")
"""Languages of blocks that are only looked at."""

SLOW = {
    "docs/quickstart.md",
    *(f"docs/howto/{page}.md" for page in ("hub", "launch-script", "modelscope", "page-cache")),
    *(f"docs/howto/{page}.md" for page in ("reload", "serve")),
    *(f"docs/howto/{page}.md" for page in ("shared-tables", "sinks-and-experts")),
}
"""Pages with code that starts clusters; the README's own is always run."""

HUB = "docs/howto/hub.md"
"""The page that is run against a hub on loopback, which has the demo's model."""

MODELSCOPE = "docs/howto/modelscope.md"
"""The same for ModelScope."""

BY_CI = ["python -m pip install -e '.[demo]' && raywl demo", "python -m pip install -e '.[test]' && pytest"]
"""The two commands of the README, each of which `.ci/run` or its like runs in a fresh environment."""

_FENCE = re.compile(
    r"^(?P<fence>```+)(?P<language>[^\n`]*)\n(?P<body>.*?)^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL
)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    body: str
    line: int
    """Of its first line of code."""


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(found["language"].strip(), found["body"], text.count("\n", 0, found.start("body")) + 1)
        for found in _FENCE.finditer(text)
    ]


def script(page: Path) -> str:
    """A page's blocks as one Python script, with the same line numbers as the page."""
    lines = page.read_text().count("\n") + 1
    out = [""] * lines
    for block in blocks(page):
        rows = block.body.splitlines()
        if block.language == "python":
            out[block.line - 1 : block.line - 1 + len(rows)] = rows
        elif block.language == "console":
            commands = [row for row in rows if row not in BY_CI]
            out[block.line - 1] = (
                f"__import__('subprocess').run(['bash', '-euc', {chr(10).join(commands)!r}], check=True)"
            )
    return "\n".join(out) + "\n"


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on loopback with the demo's model, for a page that downloads it."""
    from raywl.demo.assets import model_folder

    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with HubServer() as server:
        files = {path.name: path.read_bytes() for path in model_folder().iterdir() if path.is_file()}
        server.add("sentence-transformers/all-MiniLM-L6-v2", files)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield


@pytest.fixture
def modelscope(monkeypatch, tmp_path):
    """ModelScope on loopback with the demo's model."""
    from raywl.demo.assets import model_folder

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
    monkeypatch.setenv("MODELSCOPE_HOME", str(tmp_path / "home"))
    with ModelScopeServer() as server:
        files = {path.name: path.read_bytes() for path in model_folder().iterdir() if path.is_file()}
        server.add("sentence-transformers/all-MiniLM-L6-v2", files)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", server.url)
        yield


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (name(page) in SLOW), id=name(page))
        for page in PAGES
        if any(b.language in RUN for b in blocks(page))
    ],
)
@pytest.mark.timeout(300)
def test_the_code_runs(page, tmp_path, request, monkeypatch):
    """Blocks run in the order of the page, in one process and an empty folder, as a reader would run them.

    How-to pages have the repository's examples there, as in a clone of it. The cache of whoever runs the
    tests is left alone.
    """
    monkeypatch.setenv("RAYWL_CACHE", str(tmp_path / "cache"))
    if name(page) == HUB:
        request.getfixturevalue("hub")
    if name(page) == MODELSCOPE:
        request.getfixturevalue("modelscope")
    path = tmp_path / f"{page.stem}_page.py"
    path.write_text(script(page))
    work = tmp_path / "work"
    work.mkdir()
    if page.parent.name == "howto":
        (work / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run(
        [sys.executable, str(path)], cwd=work, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, f"{name(page)}:\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_code_is_only_for_show(page):
    """A block is run, or is of a kind that can't be."""
    for block in blocks(page):
        assert block.language in RUN + SHOWN, f"{name(page)}:{block.line}: {block.language!r}"
        assert block.language != "text" or not re.search(r"^(\$|>>>) ", block.body, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in _LINK.findall(page.read_text()):
        if "://" not in target and not target.startswith("#"):
            assert (page.parent / target.partition("#")[0]).exists(), f"{name(page)}: {target}"


def test_the_two_commands():
    """The README has them, word for word, and the check runs what they run."""
    rows = [row for block in blocks(ROOT / "README.md") for row in block.body.splitlines()]
    assert set(BY_CI) <= set(rows)
    check = (ROOT / ".ci" / "run").read_text()
    assert BY_CI[1] in check
    assert re.search(r"^raywl demo$", check, re.MULTILINE)


def test_every_page_is_reached():
    """A reader who starts at the README finds each page."""
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        todo += [
            (page.parent / target.partition("#")[0]).resolve()
            for target in _LINK.findall(page.read_text())
            if "://" not in target and not target.startswith("#")
        ]
    lost = [name(page) for page in PAGES if page not in seen and page.parent.name != "changelog"]
    assert not lost
