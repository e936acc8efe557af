"""The source files of the project, parsed once."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]


class Import(msgspec.Struct, frozen=True):
    """``module`` as it is named; ``when``: at ``import``, at a ``call``, or only for ``types``."""

    module: str
    line: int
    when: str


class Source:
    """One Python file: where it is, what it is called, its text and its syntax tree."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        parts = Path(name).with_suffix("").parts
        self.module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.text = text
        self.tree = ast.parse(self.text, filename=self.name)
        self.imports = tuple(_imports([self.tree], when="import"))

    def __repr__(self) -> str:
        return self.name

    def at(self, node: ast.AST) -> str:
        """``file:line`` of a node, as an editor opens it."""
        return f"{self.name}:{node.lineno}"


def _imports(body: list[ast.AST], *, when: str) -> list[Import]:
    """Every import below ``body``, in order."""
    found: list[Import] = []
    for node in body:
        match node:
            case ast.Import(names=names):
                found += [Import(name.name, node.lineno, when) for name in names]
            case ast.ImportFrom(module=str(module), names=names):
                found += [Import(f"{module}.{name.name}", node.lineno, when) for name in names]
            case ast.FunctionDef() | ast.AsyncFunctionDef() if when == "import":
                found += _imports(list(ast.iter_child_nodes(node)), when="call")
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                found += _imports(list(node.body), when="types")
                found += _imports(list(node.orelse), when=when)
            case _:
                found += _imports(list(ast.iter_child_nodes(node)), when=when)
    return found


@pytest.fixture(scope="session")
def sources() -> list[Source]:
    """Every file of the packages ``kvd``, ``tui`` and ``benchmarks``."""
    packages = ("kvd", "tui", "benchmarks")
    paths = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    return [Source(str(path.relative_to(ROOT)), path.read_text("utf-8")) for path in paths]


@pytest.fixture
def planted() -> Callable[[str, str], list[Source]]:
    """Makes the sources of a project of one file, to see a rule bite."""
    return lambda name, text: [Source(name, text)]


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the repository."""
    return ROOT
