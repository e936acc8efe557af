"""Figures as text."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence


class Figures(msgspec.Struct, frozen=True):
    """A table with a title and sentences below it."""

    title: str
    headers: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: list[str]


def percentile(values: Sequence[float], rank: float) -> float:
    """The smallest value that ``rank`` percent of them do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * rank / 100) - 1)]


def say(text: str) -> None:
    """To whoever ran the program."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def show(figures: Figures) -> str:
    """As lines of text."""
    table = [figures.headers, *figures.rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(figures.headers))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
    rule = "-" * len(lines[0])
    return "\n".join([figures.title, "", lines[0], rule, *lines[1:], "", *figures.notes])
