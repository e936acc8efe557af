"""Inputs to the core, effects to the world, events to the bus: the one mutator of the daemon.

``Paranoid`` is the same with I1 to I10 asked after every step: ``kvd serve --paranoid``.

An effect may cause an input at once (an order to a transfer process that has just died). Such an
input waits until the effects of the running step are all carried out, so steps never nest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from mypy_extensions import mypyc_attr
from typing_extensions import override

from kvd.core import effects
from kvd.core.audit.invariants import violations
from kvd.core.inputs import (
    CheckedAll,
    FromClient,
    FromOperator,
    FromWorker,
    Tick,
    WorkerCopies,
)
from kvd.core.rest import is_still
from kvd.errors import Code, Refusal
from kvd.wire.admin import AdminFailed
from kvd.wire.client import Failed, Push

if TYPE_CHECKING:
    from kvd.core.inputs import Input
    from kvd.core.node import NodeState
    from kvd.observe.bus import Bus

T = TypeVar("T")

Perform = dict[type, Callable[[Any], None]]
"""Who carries out which effect: Any, because each takes its own type."""

NO_FAULTS: Final[frozenset[str]] = frozenset()

MAX_ERROR = 500
"""Characters of an exception that whoever waits is told."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Reactor:
    """Feeds the node. ``on_bug`` hears of an exception out of a step, or out of an effect.

    Both are bugs of ours. They cost what met them: the effects and events beside it still happen.
    """

    def __init__(
        self,
        node: NodeState,
        bus: Bus,
        *,
        clock: Callable[[], float],
        on_bug: Callable[[str, BaseException], None],
    ) -> None:
        self.node = node
        self.clock = clock
        # Filled by the composition root: who performs an effect feeds inputs, so each needs the
        # other, and one of the two must come later.
        self.perform: Perform = {}
        self._record: Callable[[Input, bytes], None] | None = None
        self._on_stir: Callable[[], None] | None = None
        self.ticked_s = float("-inf")
        """When the last ``Tick`` was stepped without a bug."""
        self._bus = bus
        self._on_bug = on_bug
        self._waiting: deque[tuple[Input, bytes]] = deque()
        self._is_stepping = False

    def record_with(self, record: Callable[[Input, bytes], None]) -> None:
        """Have ``record`` see every input before it is stepped, and the frame that it came in."""
        self._record = record

    def record_no_more(self) -> None:
        """Nobody sees inputs but the node."""
        self._record = None

    def tell_of_stir(self, on_stir: Callable[[], None]) -> None:
        """Call this once, at the next input that is not of those that come to a node at rest."""
        self._on_stir = on_stir

    def feed(self, happened: Input, frame: bytes = b"") -> None:
        """Apply one input, carry out its effects in order, publish its events in order.

        ``frame`` is what its message came in, if it came in one, for whoever records.
        """
        if self._on_stir is not None and not is_still(happened):
            stir, self._on_stir = self._on_stir, None
            stir()
        if self._is_stepping:
            # Behind the effects of the running step: in the middle of them the world would be ahead
            # of the node.
            self._waiting.append((happened, frame))
            return
        # While effects and events are carried out too, not only while the node steps.
        self._is_stepping = True
        try:
            self._step(happened, frame)
            while self._waiting:
                self._step(*self._waiting.popleft())
        finally:
            self._is_stepping = False

    def _step(self, happened: Input, frame: bytes) -> None:
        # A bug of the core must cost the request that met it, not the node with everybody's pages.
        # Before it is stepped, also where that raises: a replay must come to the same bug.
        if self._record is not None:
            self._record(happened, frame)
        try:
            step = self.node.step(happened)
            if type(happened) is Tick:
                self.ticked_s = happened.at_s
        except Exception as error:  # noqa: BLE001
            self._on_bug(f"step {type(happened).__name__}", error)
            # What the step had said before it raised is true of the node as it is now.
            step = self.node.out.drain()
            answer = self._apology(happened, error)
            if answer is not None:
                step.effects.append(answer)
        self._carry_out(step.effects)
        try:
            self._bus.publish(step.events)
        except Exception as error:  # noqa: BLE001
            self._on_bug("publish", error)

    def _carry_out(self, effects_in_order: list[effects.Effect]) -> None:
        """Each effect, whatever becomes of the others; who waits for one that failed is told."""
        perform = self.perform
        for effect in effects_in_order:
            try:
                perform[type(effect)](effect)
            except Exception as error:  # noqa: BLE001
                self._on_bug(f"perform {type(effect).__name__}", error)
                answer = self._apology(effect, error)
                # One apology that cannot be carried out is given up: another one for it would fail
                # alike.
                if answer is not None and not _is_apology(effect):
                    self._carry_out([answer])

    def attempt(self, task: str, work: Callable[[], T]) -> T | Refusal:
        """What ``work`` gives; a bug in it is reported, and costs only whoever asked."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001
            self._on_bug(task, error)
            return self._regret(error)

    def _regret(self, error: Exception) -> Refusal:
        return Refusal(
            Code.INTERNAL,
            f"a bug of the daemon: {repr(error)[:MAX_ERROR]}; its log has the traceback, please "
            "report it",
            side=self.node.settings.name,
        )

    def _apology(
        self, what: Input | effects.Effect, error: Exception
    ) -> effects.AnswerEngine | effects.AnswerWorker | effects.AnswerOperator | None:
        """What to tell the one who waits for ``what``; None if nobody does."""
        refusal = self._regret(error)
        match what:
            case FromClient(session=session, message=request):
                return effects.AnswerEngine(session, Failed(request.call, refusal))
            case (
                FromWorker(worker=worker, message=word) | WorkerCopies(worker=worker, message=word)
            ):
                return effects.AnswerWorker(worker, word.call, refusal)
            case FromOperator(operator=operator, message=question):
                return effects.AnswerOperator(operator, AdminFailed(question.call, refusal))
            case effects.AnswerEngine(session=session, message=message) if not isinstance(
                message, Push
            ):
                return effects.AnswerEngine(session, Failed(message.call, refusal))
            case effects.AnswerOperator(operator=operator, message=report):
                return effects.AnswerOperator(operator, AdminFailed(report.call, refusal))
            case _:
                return None


@mypyc_attr(allow_interpreted_subclasses=True)
class Paranoid(Reactor):
    """Asks every rule after every step, of which the standing audit asks a few in a thousand.

    What it finds goes in as an input, so a recording replays it; and only when it is news, so a
    rule that stays broken costs the look at it and no more.
    """

    _known: frozenset[str] = NO_FAULTS

    @override
    def _step(self, happened: Input, frame: bytes) -> None:
        super()._step(happened, frame)
        found = self.attempt("check", lambda: violations(self.node))
        if isinstance(found, Refusal) or self._known == (now := frozenset(found)):
            return
        self._known = now
        # An input like any other: what containment does about it must be done again by a replay.
        super()._step(CheckedAll(self.clock()), b"")
        # What was contained is gone by now: compared with what was found, it would be news at each
        # step.
        left = self.attempt("check", lambda: violations(self.node))
        if not isinstance(left, Refusal):
            self._known = frozenset(left)


def _is_apology(effect: effects.Effect) -> bool:
    """Whether another one for it would fail too."""
    match effect:
        case effects.AnswerEngine(message=Failed()) | effects.AnswerOperator(message=AdminFailed()):
            return True
        case _:
            return False
