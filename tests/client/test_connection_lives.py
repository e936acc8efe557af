"""Random lives: a connection, and a model of the daemon, which ends and is back at any moment.

After each run the daemon must hold exactly the leases that the engine holds; no request may be
about a handle of another life, but for the release of a lease.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvd.client.connection import Call, Connection
from kvd.errors import Code, Refusal
from kvd.types import Tokens
from kvd.wire import client as wire
from kvd.wire.codec import CLIENT_REPLIES, CLIENT_REQUESTS

if TYPE_CHECKING:
    from kvd.client.state import LeaseView

GONE = Refusal(Code.UNREACHABLE, "the daemon is gone", side="client")
PICK = st.integers(0, 1000)


class Lives(RuleBasedStateMachine):
    """The engine's side is real. ``held`` are the daemon's leases, ``sends`` those of this life."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Connection(max_frame_bytes=4096)
        self.held: set[int] = set()
        self.sends: set[int] = set()
        self.last_lease = 70
        self.coming: list[wire.Request] = []
        self.calls: list[Call] = []
        self.mine: list[LeaseView] = []
        self.is_up = True
        self.named: tuple[int, ...] | None = None

    def begin(self, request: wire.Request, lease: LeaseView | None = None) -> Call:
        tokens = Tokens(b"") if type(request) in wire.TAKES_TOKENS else None
        call = self.own.begin(request, tokens, lease)
        self.flush()
        return call

    def flush(self) -> None:
        for out in self.own.take_outgoing():
            request = CLIENT_REQUESTS.decode(out.frames[0])
            assert not isinstance(request, Refusal)
            self.coming.append(request)

    def answer(self, reply: wire.Reply) -> None:
        self.own.feed([CLIENT_REPLIES.encode(reply)])
        self.flush()

    # ---- the engine ------------------------------------------------------------------------------

    @precondition(lambda self: self.is_up)
    @rule()
    def opens(self) -> None:
        self.calls.append(self.begin(wire.OpenLease(self.own.next_call())))

    @precondition(lambda self: self.is_up)
    @rule()
    def gets_a_lease(self) -> None:
        self.opens()
        while self.coming:
            self.reads()
        self.takes_its_answers()

    @precondition(lambda self: self.is_up)
    @rule()
    def sends_a_prompt(self) -> None:
        self.calls.append(self.begin(wire.SendRequest(self.own.next_call(), 5, 1)))

    @precondition(lambda self: self.calls)
    @rule(pick=PICK)
    def goes_away(self, pick: int) -> None:
        self.own.abandon(self.calls.pop(pick % len(self.calls)))
        self.flush()

    @precondition(lambda self: any(one.answer.value for one in self.calls))
    @rule()
    def takes_its_answers(self) -> None:
        answered = [one for one in self.calls if one.answer.value is not None]
        self.calls = [one for one in self.calls if one.answer.value is None]
        self.mine += [
            one.lease
            for one in answered
            if isinstance(one.answer.value, wire.Leased) and one.lease is not None
        ]

    @precondition(lambda self: self.mine)
    @rule(pick=PICK)
    def releases(self, pick: int) -> None:
        lease = self.mine.pop(pick % len(self.mine))
        request = wire.ReleaseLease(self.own.next_call(), lease.number)
        if lease.lost is None:
            self.begin(request, lease)
        elif self.own.forget_lease(lease):
            self.begin(request)

    # ---- the daemon ------------------------------------------------------------------------------

    @precondition(lambda self: self.coming)
    @rule()
    def reads(self) -> None:
        request = self.coming.pop(0)
        match request:
            case wire.OpenLease(call):
                self.last_lease += 1
                self.held.add(self.last_lease)
                self.answer(wire.Leased(call, self.last_lease, 0, b""))
            case wire.ReleaseLease(call, lease):
                assert lease in self.held
                self.held.discard(lease)
                self.answer(wire.Done(call))
            case wire.SendRequest(call):
                self.sends.add(len(self.sends) + 1)
                self.answer(wire.Sending(call, len(self.sends)))
            case wire.AbortSend(call, send):
                assert send in self.sends
                self.answer(wire.Done(call))
            case wire.CancelCall(call):
                self.answer(wire.Done(call))

    @precondition(lambda self: self.is_up)
    @rule()
    def ends(self) -> None:
        self.is_up = False
        self.coming.clear()
        self.sends.clear()
        self.own.lost(GONE)

    @precondition(lambda self: not self.is_up)
    @rule()
    def hears_what_is_still_used(self) -> None:
        self.named = self.own.unreleased()
        self.held &= set(self.named)

    @precondition(lambda self: self.named is not None)
    @rule(keeps=st.booleans())
    def is_back(self, keeps: bool) -> None:
        assert self.named is not None
        if not keeps:
            self.held.clear()
        self.is_up = True
        self.own.returned(tuple(self.held), max_frame_bytes=4096)
        self.named = None
        self.flush()

    # ---- what must hold --------------------------------------------------------------------------

    @invariant()
    def no_page_of_an_engine_is_anyone_elses(self) -> None:
        for lease in self.mine:
            assert lease.number in self.held or not lease.is_kept

    def teardown(self) -> None:
        if not self.is_up:
            self.hears_what_is_still_used()
            self.is_back(keeps=True)
        while self.coming:
            self.reads()
        for call in self.calls:
            self.own.abandon(call)
        self.flush()
        while self.coming:
            self.reads()
        assert self.held == {one.number for one in self.mine if one.is_kept}


Lives.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLives = Lives.TestCase
