"""Replaying a recording: the same events, the same final state, and whether they are the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.core.audit.invariants import violations
from kvd.core.replay.freeze import Unfreezable, state_hash
from kvd.core.replay.thaw import NotFrozen, thaw
from kvd.recorder.input_records import Unknown
from kvd.recorder.player import Bug, Player, Strayed
from kvd.recorder.recording import Damaged, records_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core.node import NodeState
    from kvd.recorder.recording import Recording
    from kvd.wire.events import Event


class BrokenInvariant(msgspec.Struct, frozen=True):
    """An invariant that did not hold after a step."""

    step: int
    what: str


class ReplayOutcome(msgspec.Struct, frozen=True):
    """What came of a replay.

    ``stopped`` is why it did not come to the end, empty if it did. ``recorded_hash`` is of the live
    node, empty if unknown; ``marks`` of its states were found equal on the way.
    """

    inputs: int
    steps: int
    last_event: int
    state_hash: str
    recorded_hash: str
    marks: int
    stopped: str
    strayed: str
    bugs: tuple[Bug, ...]
    broken: tuple[BrokenInvariant, ...]

    @property
    def is_equal(self) -> bool:
        """Whether nothing was found that differs from what was recorded."""
        is_same = self.recorded_hash in {"", self.state_hash} or bool(self.stopped)
        return is_same and not self.strayed


def begin(recording: Recording) -> NodeState:
    """The node where the recording begins.

    Raises:
        Damaged: it cannot be made by this version of kvd.
    """
    try:
        return thaw(recording.base)
    except NotFrozen as error:
        raise Damaged(str(error)) from error


def replay(
    recording: Recording,
    node: NodeState,
    told: Callable[[Event], None],
    *,
    until: int | None = None,
    is_checking: bool = False,
) -> ReplayOutcome:
    """Step ``node``, which ``begin`` made, through every record.

    Args:
        recording: what is replayed.
        node: where it begins; afterwards where it ends.
        told: hears every event, in order.
        until: stop after the step that makes the event of this number.
        is_checking: look for broken invariants after every step; the first few are kept.

    Raises:
        Damaged: a record cannot be read by this version of kvd.
    """
    try:
        player = Player(node)
    except AttributeError as error:
        # Where a class keeps its attributes is not said, so the thaw cannot miss one of the node.
        raise Damaged(f"the frozen node lacks what every node has: {error}") from error
    broken: list[BrokenInvariant] = []
    inputs, stopped, strayed = 0, "", ""
    try:
        for record in records_in(recording.records):
            step = player.play(record)
            if step is None:
                continue
            inputs += 1
            for event in step.events:
                told(event)
            if is_checking and not broken:
                broken = [BrokenInvariant(node.steps, what) for what in violations(node)]
            if until is not None and node.out.seq >= until:
                stopped = f"event {node.out.seq} was reached, as asked"
                break
    except Strayed as error:
        strayed = str(error)
    except Unknown as error:
        raise Damaged(f"input {inputs + 1} is none that this kvd knows: {error}") from error
    return ReplayOutcome(
        inputs=inputs,
        steps=node.steps,
        last_event=node.out.seq,
        state_hash=_hash_of(node),
        recorded_hash=recording.header.state_hash,
        marks=player.marks,
        stopped=stopped,
        strayed=strayed,
        bugs=tuple(player.bugs),
        broken=tuple(broken),
    )


def _hash_of(node: NodeState) -> str:
    """Of the state that was reached; a forged beginning may hold what no node can."""
    try:
        return state_hash(node)
    except Unfreezable as error:
        raise Damaged(f"it ends in a state that no node can have: {error}") from error
