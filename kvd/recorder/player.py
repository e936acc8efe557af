"""Steps a node through records, as the daemon stepped its own.

A bug that raised in the daemon's step raises here too, and costs the same: what the step had not
done is not done, the node goes on. At a mark the two nodes are compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.recorder.input_records import input_of, mark_in, mark_of

if TYPE_CHECKING:
    from kvd.core.effects import Step
    from kvd.core.node import NodeState
    from kvd.recorder.record_layout import InputRecord


MAX_BUGS = 1000
"""Remembered; a node of which every step raises must not fill the memory."""


class Strayed(Exception):
    """The node is in another state than the recorded one was; the message says since when."""


class Bug(msgspec.Struct, frozen=True):
    """A step that raised: its number, its input, what was raised."""

    step: int
    happened: str
    error: str


class Player:
    """One node, stepped from records. ``bugs`` are the first steps that raised."""

    def __init__(self, node: NodeState) -> None:
        self.node = node
        self.bugs: list[Bug] = []
        self.marks = 0
        """How many were found true."""
        self._true_at = node.steps

    def play(self, record: InputRecord) -> Step | None:
        """Apply one record; the step of an input, None for a mark.

        Raises:
            Unknown: the record is of another version of kvd, or none.
            Strayed: it is a mark, and not of this node's state.
        """
        if record.is_mark:
            self._compare(record)
            return None
        happened = input_of(record)
        try:
            return self.node.step(happened)
        except Exception as error:  # noqa: BLE001 - as the reactor does, or the two would part
            bug = Bug(self.node.steps, type(happened).__name__, repr(error))
            if len(self.bugs) < MAX_BUGS:
                self.bugs.append(bug)
            return self.node.out.drain()

    def _compare(self, record: InputRecord) -> None:
        theirs, ours = mark_in(record), mark_of(self.node)
        if ours == theirs:
            self.marks += 1
            self._true_at = ours.steps
            return
        raise Strayed(
            f"after step {theirs.steps} and event {theirs.seq} the recorded node was in another "
            f"state than this one, at step {ours.steps} and event {ours.seq}; they were last seen "
            f"equal at step {self._true_at}"
        )
