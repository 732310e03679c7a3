"""The reference is what the docstrings say."""

from __future__ import annotations

import importlib.util
import inspect

import pytest

from tests.repository.imports import ROOT

SCRIPT = ROOT / "docs" / "build_reference.py"


@pytest.fixture(scope="module")
def builder():
    spec = importlib.util.spec_from_file_location("build_reference", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_current(builder):
    made = builder.pages()
    there = {path.name: path.read_text() for path in builder.FOLDER.glob("*.md")}
    assert set(there) == set(made)
    stale = sorted(name for name in made if made[name] != there[name])
    assert not stale, "docstrings or signatures have changed: run `python docs/build_reference.py`"


def test_two_runs_make_the_same(builder):
    assert builder.pages() == builder.pages()


def test_every_public_name_is_on_its_page(builder):
    made = builder.pages()
    for module in builder.MODULES:
        page = made[f"{module}.md"]
        for name in importlib.import_module(module).__all__:
            value = getattr(importlib.import_module(module), name)
            if inspect.isclass(value) or inspect.isfunction(value):
                assert f"\n## {name}\n" in page
                assert (value.__doc__ or "").strip().splitlines()[0].strip() in page.replace("&lt;", "<")


class Sample:
    """A class.

    With `<b>` and <i>:

        code <x>

    Args:
        one: The first,
            in two lines.

    Raises:
        ValueError: Never.
    """

    def __init__(self, one: int, *, two: str = "2") -> None: ...

    def method(self, *args: int, key: bool = False, **more: object) -> list[int]:
        """Does it.

        Yields:
            Numbers, in
            order.

        """


def test_how_a_class_is_shown(builder):
    text = builder._entry("Sample", Sample)
    assert "```text\nSample(one: int, *, two: str = '2')\n```" in text
    assert "With `<b>` and &lt;i>:\n\n    code <x>\n" in text
    assert "Args:\n\n- `one`: The first, in two lines.\n\nRaises:\n\n- `ValueError`: Never." in text
    assert "method(*args: int, key: bool = False, **more: object) -> list[int]" in text
    assert "Yields: Numbers, in order." in text
