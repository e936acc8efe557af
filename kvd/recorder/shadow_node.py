"""The node as it was where the ring begins, and the file that both make together.

An input that falls off the ring is stepped into the shadow, so ring and shadow are always the
whole story of the last ``keep_s`` seconds, or of as much as the ring holds of them.
"""

from __future__ import annotations

import datetime
import gc
from typing import TYPE_CHECKING

from kvd.core.replay.freeze import UNLIMITED, freeze
from kvd.recorder import recording
from kvd.recorder.player import Player

if TYPE_CHECKING:
    from pathlib import Path

    from kvd.core.node import NodeState
    from kvd.recorder.kept_records import KeptRecords
    from kvd.recorder.orders import BeginRecording


class ShadowNode:
    """The node before the oldest of the ``records``."""

    def __init__(self, node: NodeState, records: KeptRecords, begin: BeginRecording) -> None:
        self._player = Player(node)
        self._records = records
        self._begin = begin

    def step(self) -> None:
        """Step the oldest record into the shadow.

        Raises:
            Strayed: the shadow is not what the node was.
            Unknown: the record cannot be read.
        """
        records = self._records
        record, after = records.ring.read(records.at)
        self._player.play(record)
        records.drop(after=after, at_s=record.at_s, is_mark=record.is_mark)

    def frozen(self, max_objects: int = UNLIMITED) -> bytes:
        """The shadow as bytes.

        Raises:
            TooManyObjects: it has more than that.
        """
        return freeze(self._player.node, max_objects=max_objects)

    def save(self, path: Path, why: str, upto: int, state_hash: str) -> recording.Header:
        """Write everything before ``upto`` to ``path``.

        Raises:
            OSError: it cannot be written.
        """
        records = self._records
        records.look()
        inputs, newest_s = records.before(upto)
        gc.disable()  # a frozen node is millions of small lists, and none of them is waste
        base = self.frozen()
        gc.enable()
        header = recording.Header(
            format=recording.FORMAT,
            kvd=self._begin.kvd,
            node=self._begin.node,
            incarnation=self._begin.incarnation,
            why=why,
            saved_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            seconds=max(0.0, newest_s - records.oldest_s),
            inputs=inputs,
            base_bytes=len(base),
            record_bytes=upto - records.at,
            state_hash=state_hash,
        )
        recording.write(path, header, base, records.ring.pieces(records.at, upto, 2**20))
        return header
