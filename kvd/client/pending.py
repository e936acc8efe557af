"""Calls that were begun and go on while their engine does something else: no thread, no loop.

What lives here: one such call, and how a blocking verb is made of one. What must not: sockets; a
``CallDriver`` has those, which is the channel of the blocking client.

Theory of operation. A verb is the coroutine of the asynchronous client. It is stepped here: it says
what it waits for, and is stepped again once that has come or its time is up. Nothing is read but by
``Node.pump``, by ``poll``, and by whatever blocks. To cancel is to close the coroutine, which
undoes what it did as it does on a loop.
"""

from __future__ import annotations

import inspect
import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from kvd.errors import Code, KvdError, Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from kvd.client.state import Slot

T = TypeVar("T")
S = TypeVar("S")
P = ParamSpec("P")


SlotWait = tuple["Slot[Any]", float]
"""What a verb waits for: that slot, until then."""


class CallDriver(Protocol):
    """Who brings what pending calls wait for."""

    @property
    def is_over(self) -> bool:
        """Whether nothing will come any more."""
        ...

    def begun(self, call: PendingCall[Any]) -> None:
        """It goes on from now on."""
        ...

    def woke(self, call: PendingCall[Any]) -> None:
        """What it waits for has come."""
        ...

    def ended(self, call: PendingCall[Any]) -> None:
        """It goes on no more."""
        ...

    def told(self, call: PendingCall[Any]) -> None:
        """Its engine knows how it ended."""
        ...

    def glance(self) -> None:
        """Take what has come; never blocks."""
        ...

    def block(self, slot: Slot[Any], until_s: float) -> None:
        """Return when the slot is filled, or at that time."""
        ...


class PendingCall(Generic[T]):
    """A call under way. It ends by its own deadline at the latest, in an outcome or an error.

    Whoever drops one without a word leaves it to go on: ``cancel`` it to have it undone.
    """

    __slots__ = (
        "_driver",
        "_error",
        "_handle",
        "_outcome",
        "_slot",
        "_undo",
        "_until_s",
        "_verb",
        "_wake",
    )

    def __init__(
        self,
        driver: CallDriver,
        verb: Coroutine[Any, Any, Any],
        undo: Callable[[T], object] | None = None,
        handle: Callable[[Any, CallDriver], T] | None = None,
    ) -> None:
        """Use ``begin_lease`` and its like.

        ``undo``: gives back an outcome that nobody took. ``handle``: makes the outcome of what the
        verb returns; else it is that.
        """
        self._driver = driver
        self._verb: Coroutine[Any, Any, Any] | None = verb
        self._undo = undo
        self._handle = handle
        self._slot: Slot[Any] | None = None
        """It waits for this, until ``_until_s``."""
        self._until_s = 0.0
        self._outcome: T | None = None
        self._error: BaseException | None = None
        if not self._step(verb):
            driver.begun(self)

    @property
    def is_done(self) -> bool:
        """Whether it has ended, as far as was read; reads nothing."""
        return self._verb is None

    def poll(self) -> T | None:
        """The outcome; None while there is none. Reads what has come, and never blocks.

        Raises:
            KvdError: the call ended in it; so it does each time it is asked.
        """
        slot, verb = self._slot, self._verb
        if verb is not None and slot is not None:
            if slot.value is None:
                self._driver.glance()
            if not (self.advance() if slot.value is None else self._step(verb)):
                return None
        return self._told()

    def wait(self, within_s: float) -> T | None:
        """The outcome, if there is one by then; blocks no longer, and None says that it goes on.

        Raises:
            KvdError: the call ended in it; so it does each time it is asked.
        """
        end_s = time.monotonic() + within_s
        while not self.advance() and self._slot is not None:
            self._driver.block(self._slot, min(end_s, self._until_s))
            if not self.advance() and time.monotonic() >= end_s:
                return None
        return self._told()

    def result(self, timeout_s: float | None = None) -> T:
        """The outcome; blocks until there is one.

        Args:
            timeout_s: no longer than this; left out, as long as the call itself may take.

        Raises:
            KvdError: the call ended in it; ``deadline`` after ``timeout_s``, and it goes on.
        """
        found = self.wait(math.inf if timeout_s is None else timeout_s)
        if self._verb is not None:
            raise KvdError(_still_pending(timeout_s))
        return found  # type: ignore[return-value]

    def cancel(self) -> bool:
        """Give it up; whether that came in time. What it gets all the same goes back by itself.

        An outcome that was never taken is given back too: a lease is released, a receive or a send
        ends. One that was taken is its engine's.
        """
        if self._verb is not None:
            self._end(KvdError(_cancelled()))
            self._driver.told(self)
            return True
        outcome, undo = self._outcome, self._undo
        if outcome is None or undo is None:
            return False
        self._driver.told(self)
        self._outcome, self._undo, self._error = None, None, KvdError(_cancelled())
        undo(outcome)
        return True

    def advance(self) -> bool:
        """Take note of what has been read; whether it has ended."""
        verb, slot = self._verb, self._slot
        if verb is None or slot is None:
            return True
        if slot.value is None and not self._driver.is_over:
            if time.monotonic() < self._until_s:
                return False
            # Its engine may have looked away for longer than that: what has come in time lies in
            # the socket, and is read before it is said that nothing has.
            self._driver.glance()
            if slot.value is None:
                slot.forget(self._wake)
        return self._step(verb)

    def _step(self, verb: Coroutine[Any, Any, Any]) -> bool:
        """Go on with the verb until it waits or has ended; whether it has."""
        slot: Slot[Any]
        try:
            slot, until_s = verb.send(None)
            while slot.value is not None:
                slot, until_s = verb.send(None)
        except StopIteration as end:
            made = self._handle
            self._outcome = end.value if made is None else made(end.value, self._driver)
            self._end(None)
            return True
        except KvdError as error:
            self._end(error)
            return True
        except BaseException as error:
            self._end(error)
            raise
        self._slot, self._until_s = slot, until_s
        self._wake = partial(self._driver.woke, self)
        slot.wake_with(self._wake)
        return False

    def _end(self, error: BaseException | None) -> None:
        verb, self._verb, self._error = self._verb, None, error
        if self._slot is not None:
            if self._slot.value is None:
                self._slot.forget(self._wake)
            self._slot = None
            del self._wake  # it holds this call
            self._driver.ended(self)
        if verb is not None:
            verb.close()

    def _told(self) -> T:
        self._driver.told(self)
        if self._error is not None:
            raise self._error
        self._undo = None
        outcome: T = self._outcome  # type: ignore[assignment]
        return outcome


def finished(call: PendingCall[T]) -> T:
    """Its outcome; where the wait for it is interrupted, nobody has the call, and it is undone."""
    try:
        return call.result()
    except BaseException:
        call.cancel()
        raise


def blocking(
    begin: Callable[Concatenate[S, P], PendingCall[T]],
) -> Callable[Concatenate[S, P], T]:
    """The verb that begins such a call and returns its outcome."""

    def verb(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return finished(begin(self, *args, **kwargs))

    _describe(verb, begin, "returns its outcome")
    return verb


def blocking_quietly(
    begin: Callable[Concatenate[S, P], PendingCall[T]],
) -> Callable[Concatenate[S, P], None]:
    """The verb that begins such a call and returns once it is done."""

    def verb(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        finished(begin(self, *args, **kwargs))

    _describe(verb, begin, "returns once it is done")
    return verb


def _describe(verb: Any, begin: Any, end: str) -> None:
    """For whoever reads ``help``: the parameters of the one, in the words of both."""
    told = inspect.signature(begin)
    outcome = str(told.return_annotation).removeprefix("PendingCall[").removesuffix("]")
    verb.__name__ = begin.__name__.removeprefix("begin_")
    verb.__qualname__ = begin.__qualname__.replace("begin_", "")
    verb.__module__ = begin.__module__
    verb.__doc__ = f"``{begin.__name__}``, blocking: {end}."
    told_outcome = outcome if "outcome" in end else None
    verb.__signature__ = told.replace(return_annotation=told_outcome)
    # Beside the signature: who writes a reference reads these, and would show the type variable.
    verb.__annotations__ = {**begin.__annotations__, "return": told_outcome}


def _still_pending(timeout_s: float | None) -> Refusal:
    return Refusal(
        Code.DEADLINE,
        f"the call has no outcome after {timeout_s:g} s, and goes on: ask again, or cancel it",
        side="client",
        numbers={} if timeout_s is None else {"timeout_s": timeout_s},
    )


def _cancelled() -> Refusal:
    return Refusal(
        Code.CANCELLED, "this call was cancelled here; what it got was given back", side="client"
    )
