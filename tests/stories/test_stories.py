"""The protocol told as transcripts: each ``*.txt`` here happens exactly as it is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.stories.runner import play

STORIES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story_happens_as_it_is_written(path):
    written, happened = play(path)
    if os.environ.get("KVD_REWRITE"):
        path.write_text(happened)
    else:
        assert happened == written, "KVD_REWRITE=1 writes what happens now"
