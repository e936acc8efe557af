"""The node as it was where the ring begins, and the file that both make together.

An input that falls off the ring is stepped into the shadow, so ring and shadow are always the
whole story of the last ``keep_s`` seconds, or of as much as the ring holds of them.
"""

from __future__ import annotations

import datetime
import gc
from typing import TYPE_CHECKING

from kvd.core.replay.freeze import freeze
from kvd.recorder import recording
from kvd.recorder.orders import Covered
from kvd.recorder.player import Player

if TYPE_CHECKING:
    from pathlib import Path

    from kvd.core.node import NodeState
    from kvd.recorder.orders import BeginRecording
    from kvd.recorder.ring import RecordRing

FULL_SHARE = 0.75
"""Of the ring may be records; the rest is for what comes while a file is written."""


class ShadowNode:
    """The shadow and its place in the ring. ``look`` before ``is_due``, ``step`` while it is."""

    def __init__(self, node: NodeState, ring: RecordRing, begin: BeginRecording) -> None:
        self._player = Player(node)
        self._ring = ring
        self._begin = begin
        self._at = ring.begin
        """The oldest record."""
        self._seen = ring.begin
        """Everything before this was counted."""
        self._inputs = 0
        self._newest_s = self._oldest_s = node.out.at_s

    def look(self) -> None:
        """Count what the daemon has written since the last look."""
        end = self._ring.end
        while self._seen < end:
            is_mark, self._newest_s, self._seen = self._ring.skim(self._seen)
            self._inputs += not is_mark

    def is_due(self, now_s: float) -> bool:
        """Whether the oldest record must give way: to newer ones, or to time."""
        if self._at >= self._seen:
            return False
        if self._seen - self._at > FULL_SHARE * self._ring.size:
            return True
        _, at_s, _ = self._ring.skim(self._at)
        return at_s < now_s - self._begin.keep_s

    def step(self) -> None:
        """Step the oldest record into the shadow.

        Raises:
            Strayed: the shadow is not what the node was.
            Unknown: the record cannot be read.
        """
        record, after = self._ring.read(self._at)
        self._player.play(record)
        self._oldest_s = record.at_s
        self._inputs -= not record.is_mark
        self._at = after
        self._ring.forget(after)

    def covered(self) -> Covered:
        """How far back it reaches."""
        seconds = max(0.0, self._newest_s - self._oldest_s)
        return Covered(seconds, self._inputs, self._seen - self._at)

    def _before(self, upto: int) -> tuple[int, float]:
        """Inputs before ``upto``, and the time of the last; the daemon has written on since."""
        inputs, newest_s, at = 0, self._oldest_s, self._at
        while at < upto:
            is_mark, newest_s, at = self._ring.skim(at)
            inputs += not is_mark
        return inputs, newest_s

    def save(self, path: Path, why: str, upto: int, state_hash: str) -> recording.Header:
        """Write everything before ``upto`` to ``path``.

        Raises:
            OSError: it cannot be written.
        """
        self.look()
        inputs, newest_s = self._before(upto)
        gc.disable()  # a frozen node is millions of small lists, and none of them is waste
        base = freeze(self._player.node)
        gc.enable()
        header = recording.Header(
            format=recording.FORMAT,
            kvd=self._begin.kvd,
            node=self._begin.node,
            incarnation=self._begin.incarnation,
            why=why,
            saved_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            seconds=max(0.0, newest_s - self._oldest_s),
            inputs=inputs,
            base_bytes=len(base),
            record_bytes=upto - self._at,
            state_hash=state_hash,
        )
        recording.write(path, header, base, self._ring.pieces(self._at, upto, 2**20))
        return header
