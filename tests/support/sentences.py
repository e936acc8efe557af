"""Sentences that tests pin, in one file for each place that says them.

A test names the situation, as in ``sentence_of("a deadline names the node that did not come")``;
the file has the sentence below it. So who words one better edits one line, and reads all of them
side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class Sentences:
    """The file: a line that names the situation, and an indented line with what is said of it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text("utf-8").splitlines()
        self.by_situation = {
            situation: said.removeprefix("    ")
            for situation, said in zip(lines[::2], lines[1::2], strict=True)
        }

    def of(self, situation: str) -> str:
        """What is said then."""
        assert situation in self.by_situation, f"{self._path} has no sentence for: {situation}"
        return self.by_situation[situation]
