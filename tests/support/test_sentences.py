"""Every pinned sentence is somebody's, and stands once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sentences import Sentences

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("place", ["cli", "console", "core"])
def test_every_pinned_sentence_is_asked_for_by_a_test(place):
    folder = TESTS / place
    asked = "".join(path.read_text("utf-8") for path in sorted(folder.glob("test_*.py")))
    kept = Sentences(folder / "sentences.txt").by_situation

    assert not [situation for situation in kept if f'"{situation}"' not in asked]
    assert list(kept) == sorted(kept)
