"""Sentences that a console shows: in ``sentences.txt``, by situation."""

from __future__ import annotations

from pathlib import Path

from tests.support.sentences import Sentences

SENTENCES = Sentences(Path(__file__).with_suffix(".txt"))
sentence_of = SENTENCES.of
