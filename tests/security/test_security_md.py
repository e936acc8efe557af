"""SECURITY.md says nothing that no test shows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "SECURITY.md").read_text("utf-8")
REFERENCE = re.compile(r"`(tests/[a-z0-9_/]+\.py)::(test_[a-z0-9_]+)`")
SECTIONS = {
    "What is trusted",
    "Peers: CURVE keys",
    "Engines: file modes and credentials",
    "What comes in",
    "The proxy: HTTP",
    "At most",
    "Reporting",
}


def claims(text):
    """Every item of a list, with the lines that continue it, and every row of a table."""
    found = []
    for line in text.splitlines():
        if line.startswith(("- ", "| ")) and not line.startswith("| who, where"):
            found.append(line)
        elif line.startswith("  ") and found:
            found[-1] += f"\n{line}"
    return found


def prose(text):
    """Lines that are neither headings nor claims."""
    return [
        line for line in text.splitlines() if line and not line.startswith(("#", "-", "|", " "))
    ]


def references(text):
    return [(file, name) for file, name in REFERENCE.findall(text)]


def defined_in(file):
    """The tests that a file defines; empty if there is no such file."""
    path = ROOT / file
    if not path.is_file():
        return set()
    tree = ast.parse(path.read_text("utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds)}


def test_every_claim_names_a_test():
    without = [claim for claim in claims(TEXT) if not references(claim)]
    assert len(claims(TEXT)) > 30
    assert without == []


@pytest.mark.parametrize(("file", "name"), sorted(set(references(TEXT))))
def test_every_test_that_is_named_exists(file, name):
    assert name in defined_in(file)


def test_claims_are_made_where_they_are_checked():
    """Prose stands in the introduction and under Reporting only, where nothing is promised."""
    parts = re.split(r"^## (.*)$", TEXT, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))

    assert set(sections) == SECTIONS
    assert {name for name, body in sections.items() if prose(body)} == {"Reporting"}
    assert len(prose(parts[0])) == 2


def test_a_claim_without_a_test_is_found():
    assert [
        bool(references(claim)) for claim in claims("- it is safe\n- so\n  `tests/a.py::test_b`")
    ] == [
        False,
        True,
    ]
