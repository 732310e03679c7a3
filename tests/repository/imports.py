"""The imports of raywl's modules, read from their source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import raywl

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Import:
    """One module that another imports."""

    importer: str
    target: str
    """Dotted name; for `from a import b`, `a.b` where that is a module, else `a`."""
    at_module_level: bool
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


def modules() -> dict[str, Path]:
    """Every module of raywl and its file."""
    found = {}
    for folder, prefix in ((ROOT / "raywl", "raywl"), (ROOT / "actors", "raywl.actors")):
        for path in folder.rglob("*.py"):
            parts = [prefix, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _walk(node: ast.AST, at_module_level: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            # For type checkers alone: nothing is imported.
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, at_module_level
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _walk(child, at_module_level and not inside)


def imports() -> list[Import]:
    """Every import in raywl, those inside functions too, without those for type checkers alone."""
    known = modules()
    found = []
    for name, path in known.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node, at_module_level in _walk(ast.parse(path.read_text(), str(path)), True):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            else:
                base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
                source = (node.module or "") if not node.level else f"{base}.{node.module or ''}".rstrip(".")
                targets = [_target(source, alias.name, known) for alias in node.names]
            found += [Import(name, target, at_module_level, node.lineno) for target in dict.fromkeys(targets)]
    return found


def _target(source: str, name: str, known: dict[str, Path]) -> str:
    if f"{source}.{name}" in known:
        return f"{source}.{name}"
    if source == "raywl":
        # A lazy name stands for the module that it comes from.
        return raywl._HOMES.get(name, "raywl")
    return source
