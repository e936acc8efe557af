"""The pages, and the extension that makes the reference."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")


@pytest.fixture(scope="session")
def root():
    return ROOT


@pytest.fixture(scope="session")
def pages():
    """The text of every page by its path."""
    found = [ROOT / name for name in TOP]
    found += sorted((ROOT / "docs").rglob("*.md")) + sorted((ROOT / "examples").rglob("*.md"))
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in found}


@pytest.fixture(scope="session")
def reference():
    """The extension, as Sphinx loads it."""
    sys.path.insert(0, str(ROOT / "docs" / "_ext"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Sphinx, about itself
        import kvd_reference  # noqa: PLC0415
    return kvd_reference
