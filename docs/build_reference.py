"""Makes the pages of `docs/reference/` from docstrings: `python docs/build_reference.py`.

A test compares the pages with what this makes, so run it after a docstring or a signature has changed.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

MODULES = {
    "raywl": "what most programs need",
    "raywl.weight_utils": "weight utilities under the names that users of inference engines know",
    "raywl.parameters": "parameters that keep their memory when they are replaced",
    "raywl.quant": "quantisation configs, and how they say that tensors are cut",
    "raywl.loaders": "weight loaders for common layers",
    "raywl.sources": "where checkpoints come from",
    "raywl.errors": "everything that is raised on purpose",
}
"""The modules that have a page, and what each is for."""

FOLDER = Path(__file__).parent / "reference"
_SECTION = re.compile(r"^(Args|Returns|Raises|Yields):$")
_ENTRY = re.compile(r"^(?P<name>[\w*][\w*, .|\[\]`]*):\s+(?P<text>.*)$", re.DOTALL)
_MAX_LINE = 96


def pages() -> dict[str, str]:
    """All pages, by file name."""
    found = {f"{name}.md": _page(name) for name in MODULES}
    rows = [f"| [`{name}`]({name}.md) | {what} |" for name, what in MODULES.items()]
    found["README.md"] = _joined(
        "# Reference",
        "Made from the docstrings by `docs/build_reference.py`; change those, not these pages.",
        "\n".join(["| | |", "|---|---|", *rows]),
    )
    return found


def _joined(*parts: str) -> str:
    return "\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"


def _page(name: str) -> str:
    module = importlib.import_module(name)
    parts = [f"# {name}", _prose(inspect.getdoc(module) or "")]
    for public in module.__all__:
        value = getattr(module, public)
        if not inspect.ismodule(value) and not isinstance(value, str):
            parts.append(_entry(public, value))
    return _joined(*parts)


def _entry(name: str, value: Any) -> str:
    if inspect.isclass(value):
        return _class(name, value)
    if callable(value):
        return _joined(f"## {name}", _signature(name, value), _doc(value))
    # A type alias or a constant, which has no docstring of its own.
    return _joined(f"## {name}", _fence(f"{name} = {value}"))


def _class(name: str, cls: type) -> str:
    bases = [base.__name__ for base in cls.__bases__ if base is not object and base.__module__ != "typing"]
    parts = [f"## {name}"]
    if _has_own_init(cls) or (hasattr(cls, "__dataclass_fields__") and not inspect.isabstract(cls)):
        parts.append(_signature(name, cls))
    if bases:
        parts.append("Bases: " + ", ".join(f"`{base}`" for base in bases))
    parts.append(_doc(cls))
    if _has_own_init(cls) and cls.__init__.__doc__:
        parts.append(_doc(cls.__init__))
    if rows := _attributes(cls):
        parts.append("\n".join(["Attributes:", "", *rows]))
    for key, member in vars(cls).items():
        if key.startswith("_"):
            continue
        inner = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if inspect.isfunction(inner) and inspect.getdoc(getattr(cls, key)):
            parts.append(
                _joined(f"### {name}.{key}", _signature(key, getattr(cls, key)), _doc(getattr(cls, key)))
            )
    return _joined(*parts)


def _has_own_init(cls: type) -> bool:
    init = vars(cls).get("__init__")
    return inspect.isfunction(init) and not hasattr(cls, "__dataclass_fields__")


def _attributes(cls: type) -> list[str]:
    """Fields with the docstrings below them, and properties."""
    rows = []
    with_docs = _texts_below(cls)
    for key in getattr(cls, "__dataclass_fields__", with_docs):
        if not key.startswith("_") and (key in with_docs or key in vars(cls).get("__annotations__", {})):
            text = with_docs.get(key, "")
            rows.append(f"- `{key}`" + (f": {_one_line(text)}" if text else ""))
    for key, member in vars(cls).items():
        if isinstance(member, property) and not key.startswith("_"):
            rows.append(f"- `{key}`: {_one_line(inspect.getdoc(member) or '')}")
    return rows


def _texts_below(cls: type) -> dict[str, str]:
    """The strings that stand below assignments in a class's body."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    found: dict[str, str] = {}
    for node, below in itertools.pairwise(body):
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(target, ast.Name) and isinstance(below, ast.Expr):
            text = below.value.value if isinstance(below.value, ast.Constant) else None
            if isinstance(text, str):
                found[target.id] = inspect.cleandoc(text)
    return found


def _signature(name: str, value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return _fence(f"{name}(...)")
    rows, kinds = [], set()
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not kinds & {
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        }:
            rows.append("*")
        kinds.add(parameter.kind)
        rows.append(_parameter(parameter))
    gives = signature.return_annotation
    end = "" if gives is signature.empty or inspect.isclass(value) else f" -> {_annotation(gives)}"
    text = f"{name}({', '.join(rows)}){end}"
    if len(text) > _MAX_LINE:
        text = f"{name}(\n{''.join(f'    {row},{chr(10)}' for row in rows)}){end}"
    return _fence(text)


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = stars + parameter.name
    has_type = parameter.annotation is not parameter.empty
    if has_type:
        text += f": {_annotation(parameter.annotation)}"
    if parameter.default is parameter.empty:
        return text
    # What is another one in every process is left out.
    default = re.sub(r"<factory>|<[^>]* at 0x[0-9a-f]+>", "...", repr(parameter.default))
    return f"{text} = {default}" if has_type else f"{text}={default}"


def _annotation(value: Any) -> str:
    return value if isinstance(value, str) else inspect.formatannotation(value)


def _fence(text: str) -> str:
    return f"```text\n{text}\n```"


def _doc(value: Any) -> str:
    text = inspect.getdoc(value) or ""
    # What a class or method inherits is said where it comes from.
    own = value.__doc__ if inspect.isclass(value) else text
    return _rendered(text) if own else ""


def _rendered(text: str) -> str:
    """A docstring's sections as lists."""
    parts: list[str] = []
    block: list[str] = []
    section: str | None = None

    def flush() -> None:
        if block:
            content = textwrap.dedent("\n".join(block)).strip("\n")
            parts.append(_prose(content) if section is None else _section(section, content))
        block.clear()

    for line in text.splitlines():
        if match := _SECTION.match(line):
            flush()
            section = match[1]
        elif section is not None and line and not line.startswith(" "):
            flush()
            section = None
            block.append(line)
        else:
            block.append(line)
    flush()
    return _joined(*parts)


def _section(name: str, content: str) -> str:
    entries: list[list[str]] = []
    for line in content.splitlines():
        if line.strip() and not line.startswith(" "):
            entries.append([line])
        elif entries and line.strip():
            entries[-1].append(line.strip())
    if name in ("Returns", "Yields"):
        return f"{name}: {_one_line(content)}"
    rows = []
    for entry in entries:
        text = " ".join(entry)
        match = _ENTRY.match(text)
        rows.append(f"- `{match['name']}`: {match['text']}" if match else f"- {text}")
    return "\n".join([f"{name}:", "", *rows])


def _prose(text: str) -> str:
    """Paragraphs; what is indented or between backticks stays as it is."""
    rows = [
        line if line.startswith("    ") else re.sub(r"(`[^`]*`)|<", lambda m: m[1] or "&lt;", line)
        for line in text.splitlines()
    ]
    return "\n".join(rows)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def main() -> int:
    """Writes the pages that differ, removes those of modules that have none, and tells which."""
    FOLDER.mkdir(exist_ok=True)
    made = pages()
    for name, text in made.items():
        path = FOLDER / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(path)
    for path in FOLDER.glob("*.md"):
        if path.name not in made:
            path.unlink()
            print(f"{path} removed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
