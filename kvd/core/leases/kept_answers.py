"""Answers that wait for a disk: who says an epoch, or flushes, hears of it when it is written down.

What was said counts from its step; whoever has heard of it finds the next daemon of this node in it
too. One write at a time has all of it::

    said --> begun here --> KeepEpochs --> EpochsKept --> answered
                                |
                                +--> it could not be written: refused; the node stays in it

What must not live here: what an epoch means, and a flush (``epochs``, ``flushes``), files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from mypy_extensions import mypyc_attr
from typing_extensions import override

from kvd.core import effects
from kvd.core.leases.flushes import FlushStamp, last_flush
from kvd.errors import Code, Refusal
from kvd.wire import admin, client

if TYPE_CHECKING:
    from kvd.core.inputs import EpochsFound, EpochsKept
    from kvd.core.leases.epochs import Epochs
    from kvd.core.leases.flushes import Flushes
    from kvd.core.outbox import Outbox

KEEP_WITHIN_S: Final = 4.0
"""Whoever waits so long for a disk is told: before they stop waiting for the daemon."""


class KeptState(msgspec.Struct, frozen=True):
    """What the next daemon of this node begins with."""

    epochs: dict[str, int]
    flushes: dict[str | None, FlushStamp]


@mypyc_attr(allow_interpreted_subclasses=True)
class KeptAnswer:
    """Who is told of something once it is on disk: an engine, or an operator."""

    __slots__ = ("namespace", "operator", "report", "session", "since_s")

    def __init__(
        self,
        namespace: str | None,
        since_s: float,
        *,
        report: client.FlushReport | admin.Report,
        session: int = 0,
        operator: bytes = b"",
    ) -> None:
        self.namespace = namespace
        """What it is about; None: everything."""
        self.since_s = since_s
        self.report = report
        self.session = session
        self.operator = operator

    def said(self, state: KeptState) -> object:
        """What a state has of it."""
        raise NotImplementedError

    def unkept(self, name: str, why: str) -> str:
        """What the node of that name says where it is not on disk."""
        raise NotImplementedError


@mypyc_attr(allow_interpreted_subclasses=True)
class EpochAnswer(KeptAnswer):
    """To who said an epoch, of a base."""

    __slots__ = ()

    @override
    def said(self, state: KeptState) -> object:
        return state.epochs.get(self.namespace or "", 0)

    @override
    def unkept(self, name: str, why: str) -> str:
        return (
            f"the epochs of {name} {why}. Nothing of before is found, and a restart may undo that: "
            "see to the directory (cache.epochs_directory), and say the epoch again"
        )


@mypyc_attr(allow_interpreted_subclasses=True)
class FlushAnswer(KeptAnswer):
    """To who flushed."""

    __slots__ = ()

    @override
    def said(self, state: KeptState) -> object:
        return last_flush(state.flushes, self.namespace)

    @override
    def unkept(self, name: str, why: str) -> str:
        return (
            f"the flushes of {name} {why}. Nothing of before is found until this daemon ends, and "
            "what a tier still has of it may be found after that: see to the directory "
            "(cache.epochs_directory), and flush again"
        )


@mypyc_attr(allow_interpreted_subclasses=True)
class KeptAnswers:
    """The answers that wait for a disk. One write at a time: what is said meanwhile is the next.

    Invariant: while anybody waits a write is under way.
    """

    __slots__ = (
        *("_epochs", "_flushes", "_last", "_name", "_out"),
        *("in_write", "kept", "waiting", "writing"),
    )

    def __init__(self, name: str, epochs: Epochs, flushes: Flushes, out: Outbox) -> None:
        """``name``: of the node."""
        self.kept = KeptState({}, {})
        """What is on disk."""
        self.writing: KeptState | None = None
        """What is being written; None: nothing is."""
        self.in_write: list[KeptAnswer] = []
        self.waiting: list[KeptAnswer] = []
        """Of those, what is not in ``writing``."""
        self._name = name
        self._epochs = epochs
        self._flushes = flushes
        self._out = out
        self._last = 0

    def found(self, got: EpochsFound) -> None:
        """What is on disk from the start."""
        self.kept = KeptState(dict(got.by_base), self._now().flushes)

    def _now(self) -> KeptState:
        return KeptState(dict(self._epochs.by_namespace), dict(self._flushes.by_name))

    def answer(self, answer: KeptAnswer) -> None:
        """Tell it now if what it is about is on disk, else when it is."""
        if answer.said(self.kept) == answer.said(self._now()):
            self._tell(answer, "")
            return
        self.waiting.append(answer)
        self.write()

    def write(self) -> None:
        """Have all of it as it is now written down, unless a write is under way."""
        if self.writing is not None:
            return
        self._last += 1
        flushes = self._flushes.to_keep(self._out.at_s)
        self.writing = now = self._now()
        self.in_write, self.waiting = self.waiting, []
        self._out.effects.append(
            effects.KeepEpochs(ticket=self._last, by_base=dict(now.epochs), flushes=flushes)
        )

    def written(self, got: EpochsKept) -> None:
        """The write is over, well or not."""
        if self.writing is None or got.ticket != self._last:
            return
        if not got.why:
            self.kept = self.writing
        self.writing = None
        done, self.in_write = self.in_write, []
        for answer in done:
            self._tell(answer, f"could not be written: {got.why}" if got.why else "")
        # Also where whoever has said it waits no more. What failed is not tried again by itself.
        if self.waiting or (not got.why and self.kept != self._now()):
            self.write()

    def tick(self) -> None:
        """Whoever has waited too long hears so; the write goes on, and counts when it is done."""
        late_s = self._out.at_s - KEEP_WITHIN_S
        for answers in (self.in_write, self.waiting):
            for answer in [answer for answer in answers if answer.since_s <= late_s]:
                answers.remove(answer)
                self._tell(answer, f"are not written after {KEEP_WITHIN_S:g} s")

    def _tell(self, answer: KeptAnswer, why: str) -> None:
        """That it is on disk, or ``why`` it is not."""
        name, report = self._name, answer.report
        refusal = Refusal(Code.ABORTED, answer.unkept(name, why), side=name) if why else None
        if isinstance(report, client.FlushReport):
            told = report if refusal is None else client.Failed(report.call, refusal)
            self._out.answer(answer.session, told)
            return
        said = report if refusal is None else admin.AdminFailed(report.call, refusal)
        self._out.effects.append(effects.AnswerOperator(answer.operator, said))
