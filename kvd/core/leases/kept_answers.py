"""Answers that wait for a disk: an operator or an engine hears of an epoch when it is written down.

What was said counts from its step; whoever has heard of it finds the next daemon of this node in it
too. One write at a time has all of it::

    said --> begun here --> KeepEpochs --> EpochsKept --> answered
                                |
                                +--> it could not be written: refused; the node stays in it

What must not live here: what an epoch means (``epochs``), files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from kvd.core import effects
from kvd.errors import Code, Refusal
from kvd.wire import admin, client

if TYPE_CHECKING:
    from kvd.core.inputs import EpochsFound, EpochsKept
    from kvd.core.leases.epochs import Epochs
    from kvd.core.outbox import Outbox

KEEP_WITHIN_S: Final = 4.0
"""Whoever waits so long for a disk is told: before they stop waiting for the daemon."""


@mypyc_attr(allow_interpreted_subclasses=True)
class KeptAnswer:
    """Who is told of an epoch once it is on disk: an engine, or an operator."""

    __slots__ = ("base", "operator", "report", "session", "since_s")

    def __init__(
        self,
        base: str,
        since_s: float,
        *,
        report: client.FlushReport | admin.Report,
        session: int = 0,
        operator: bytes = b"",
    ) -> None:
        self.base = base
        self.since_s = since_s
        self.report = report
        self.session = session
        self.operator = operator


@mypyc_attr(allow_interpreted_subclasses=True)
class KeptAnswers:
    """The answers that wait for a disk. One write at a time: what is said meanwhile is the next.

    Invariant: while anybody waits a write is under way.
    """

    __slots__ = ("_epochs", "_last", "_out", "in_write", "kept", "waiting", "writing")

    def __init__(self, epochs: Epochs, out: Outbox) -> None:
        self.kept: dict[str, int] = {}
        """What is on disk."""
        self.writing: dict[str, int] | None = None
        """What is being written; None: nothing is."""
        self.in_write: list[KeptAnswer] = []
        self.waiting: list[KeptAnswer] = []
        """Of those, whose epoch is not in ``writing``."""
        self._epochs = epochs
        self._out = out
        self._last = 0

    def found(self, got: EpochsFound) -> None:
        """What is on disk from the start."""
        self.kept = dict(got.by_base)

    def answer(self, answer: KeptAnswer) -> None:
        """Tell it now if its epoch is on disk, else when it is."""
        epochs = self._epochs.by_namespace
        if self.kept.get(answer.base, 0) == epochs.get(answer.base, 0):
            self._tell(answer, None)
            return
        self.waiting.append(answer)
        self.write()

    def write(self) -> None:
        """Have the epochs of now written down, unless a write is under way."""
        if self.writing is not None:
            return
        self._last += 1
        self.writing = dict(self._epochs.by_namespace)
        self.in_write, self.waiting = self.waiting, []
        self._out.effects.append(effects.KeepEpochs(self._last, dict(self.writing)))

    def written(self, got: EpochsKept) -> None:
        """The write is over, well or not."""
        if self.writing is None or got.ticket != self._last:
            return
        refusal = self._unkept(f"could not be written: {got.why}") if got.why else None
        if refusal is None:
            self.kept = self.writing
        self.writing = None
        done, self.in_write = self.in_write, []
        for answer in done:
            self._tell(answer, refusal)
        # Also where whoever has said it waits no more. What failed is not tried again by itself.
        if self.waiting or (refusal is None and self.kept != self._epochs.by_namespace):
            self.write()

    def tick(self) -> None:
        """Whoever has waited too long hears so; the write goes on, and counts when it is done."""
        late_s = self._out.at_s - KEEP_WITHIN_S
        for answers in (self.in_write, self.waiting):
            for answer in [answer for answer in answers if answer.since_s <= late_s]:
                answers.remove(answer)
                self._tell(answer, self._unkept(f"are not written after {KEEP_WITHIN_S:g} s"))

    def _unkept(self, why: str) -> Refusal:
        return Refusal(
            Code.ABORTED,
            f"the epochs of {self._epochs.name} {why}. Nothing of before is found, and a restart "
            "may undo that: see to the directory (cache.epochs_directory), and say the epoch again",
            side=self._epochs.name,
        )

    def _tell(self, answer: KeptAnswer, refusal: Refusal | None) -> None:
        report = answer.report
        if isinstance(report, client.FlushReport):
            told = report if refusal is None else client.Failed(report.call, refusal)
            self._out.answer(answer.session, told)
            return
        said = report if refusal is None else admin.AdminFailed(report.call, refusal)
        self._out.effects.append(effects.AnswerOperator(answer.operator, said))
