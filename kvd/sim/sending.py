"""What a prefill engine does: lease a prompt, write its KV, hand it over meanwhile, let go.

Lease, send; write, advance, write, advance; finish; release. Or lease, write, hand over. The end of
the lease may ride along with the last of them. Between two of them it may commit what is written.
One without a room says how far it is as well, for whoever begins with the same tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.sim.engine import EngineJob, Request, word
from kvd.sim.violation import Violated
from kvd.types import NO_TOKENS
from kvd.wire import client

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.errors import Refusal
    from kvd.sim.engine import SimSession

SLIDES = 0.2
"""Share of steps after which an engine gives back what is behind its window, needed or not."""

HAND_OVERS = 0.25
"""Share of prompts that are handed over when all is computed."""

ENDS = 0.3
"""Share of those, and of sends, with whose end the lease is over too."""

SHORT_S, LONG_S = 0.02, 0.5
"""Longest pause between two calls, of an engine with a short queue and of one with a long one."""


class SimSendingEngine(EngineJob):
    """One prompt at its prefill engine."""

    def __init__(self, session: SimSession, request: Request) -> None:
        super().__init__(session, request)
        self.send = 0
        self.aux = b""
        self.written = 0
        """Tokens whose KV is in the pages."""
        self.is_failed = False
        """The daemon has said that the send is over."""
        self._pace_s = LONG_S if self.random() < 0.2 else SHORT_S
        self._committed = False
        self._is_handed_over = False
        self._ends_lease = False
        """The lease is over when the send is answered, but for a refusal."""
        self._call = session.call(
            self.leased,
            client.OpenLease,
            self.prompt.namespace,
            0,
            request.priority,
            request.deadline_s,
            request.cache,
            session.step_tokens(),
            tokens=self.prompt.tokens,
            begins=self,
        )

    # ---- the lease ---------------------------------------------------------------------------

    def leased(self, reply: client.Leased | client.Failed) -> None:
        """There is room, or there is none."""
        if type(reply) is client.Failed:
            self.end(word(reply.refusal))
            return
        assert type(reply) is client.Leased
        self.lease = reply.lease
        self.rows.take(reply)
        self.written = reply.prefix_tokens
        self.rows.go_on(self.prompt, self.written, "a cached prefix")
        self.agenda.after(self._pace_s * self.random(), self.open)

    def open(self) -> None:
        """Offer it to whoever comes for the room; without one, compute it for later."""
        if not self.session.is_alive:
            return
        request = self.request
        if request.room and self.random() < HAND_OVERS:
            self._compute(self.prompt.n_tokens, self._hand_over)
        elif request.room:
            self.session.call(
                self.opened,
                client.SendRequest,
                request.room,
                self.lease,
                self.prompt.namespace,
                request.deadline_s,
                request.to,
                tokens=self.prompt.tokens,
            )
        else:
            self.go_on()

    def opened(self, reply: client.Sending | client.Failed) -> None:
        """The room is ours, or another's."""
        if type(reply) is client.Failed:
            self._leave(word(reply.refusal))
            return
        assert type(reply) is client.Sending
        self.send = reply.send
        self.session.sends[self.send] = self
        self.agenda.after(self._pace_s * self.random(), self.go_on)

    # ---- writing and telling -----------------------------------------------------------------

    def go_on(self) -> None:
        """Write some more, or finish."""
        if not self.session.is_alive:
            return
        n_tokens = self.prompt.n_tokens
        dice = self.random()
        if 0.8 < dice <= 0.9 and self.written:
            swaps = self.random() < 0.5
            self.session.call(self.committed, client.CommitUpTo, self.lease, self.written, swaps)
        elif not self.request.room:
            self._go_on_alone(dice)
        elif self.is_failed:
            self._abort("it failed")
        elif dice < 0.5 and self.written < n_tokens:
            upto = self.written + 1 + int(dice * 2 * (n_tokens - self.written))
            self._compute(upto, self._advance)
        elif dice > 0.9 and self.written == n_tokens and not self._committed:
            self._committed = True
            self.session.call(self.committed, client.CommitLease, self.lease)
        else:
            self._compute(n_tokens, self._finish)

    def _go_on_alone(self, dice: float) -> None:
        n_tokens = self.prompt.n_tokens
        if dice < 0.5 and self.written < n_tokens:
            self._compute(self.written + 1 + int(dice * 2 * (n_tokens - self.written)), self._say)
        else:
            self._compute(n_tokens, lambda: self._leave("computed"))

    def _say(self) -> None:
        self.session.call(self.said, client.SayWritten, self.lease, self.written)

    def said(self, reply: client.Done | client.Failed) -> None:
        """It knows how far the prompt is written."""
        self.done(reply)
        self.agenda.after(self._pace_s * self.random(), self.go_on)

    def _advance(self) -> None:
        self.session.call(self.advanced, client.Advance, self.send, self.written)

    def advanced(self, reply: client.Done | client.Failed) -> None:
        """It knows, or it is over."""
        if type(reply) is client.Failed:
            self.is_failed = True
        self.agenda.after(self._pace_s * self.random(), self.go_on)

    def committed(self, reply: client.PageTable | client.Failed) -> None:
        """Whole pages have joined the tree."""
        if type(reply) is client.Failed:
            raise Violated(f"{self.host.name}: {self}: {reply.refusal.message}")
        assert type(reply) is client.PageTable
        self.rows.change(reply)
        self.agenda.after(self._pace_s * self.random(), self.go_on)

    def _compute(self, upto_tokens: int, then: Callable[[], None]) -> None:
        """Write up to there, sliding on where not all of it is mapped, then do the next thing."""
        stop = min(upto_tokens, self.rows.reach_tokens)
        self.rows.write(self.prompt, self.written, stop)
        self.written = stop
        if stop < upto_tokens:
            self.slide(stop, lambda: self._compute(upto_tokens, then))
        elif self.rows.has_windows and self.random() < SLIDES:
            self.slide(stop, then)
        else:
            then()

    # ---- the end -----------------------------------------------------------------------------

    def _hand_over(self) -> None:
        request = self.request
        self.aux = self.host.world.sent_by(self)
        self._is_handed_over = True
        self._ends_lease = self.random() < ENDS
        self._call = self.session.call(
            self.finished,
            client.HandOver,
            request.room,
            self.lease,
            self.prompt.namespace,
            request.deadline_s,
            request.to,
            self.aux,
            b"",
            self._ends_lease,
            # None stands for all that the lease knows, which is the same.
            tokens=self.prompt.tokens if self.random() < 0.5 else NO_TOKENS,
        )
        self._may_let_go_early()

    def _finish(self) -> None:
        self.aux = self.host.world.sent_by(self)
        self._ends_lease = self.random() < ENDS
        if self._ends_lease:
            self.session.call(self.finished, client.FinishAndRelease, self.send, self.aux)
        else:
            self.session.call(self.finished, client.Finish, self.send, self.aux)
        self._may_let_go_early()

    def _may_let_go_early(self) -> None:
        """The engine needs the lease no longer; the send keeps it."""
        if not self._ends_lease and self.random() < 0.2:
            self.agenda.after(2 * self._pace_s * self.random(), self._let_go_early)

    def _let_go_early(self) -> None:
        if self.session.is_alive and self.lease:
            self.let_go(commits=True)

    def finished(self, reply: client.Finished | client.Failed) -> None:
        """What the decode side says has become of it."""
        if type(reply) is client.Failed:
            self._leave(word(reply.refusal))
            return
        assert type(reply) is client.Finished
        if self._ends_lease:
            self.lease = 0
        world = self.host.world
        room = self.request.room
        # By who received it: a room may be asked for again from others than this was opened for.
        is_joined = (room, self.host.name) in world.joined
        is_known = self.aux in world.delivered or room in world.left or is_joined
        if reply.failure is None and not is_known:
            raise Violated(f"{self.host.name}: {self}: said to be committed, and nobody has it")
        self._leave(word(reply.failure) if reply.failure else "delivered")

    def told(self, _: Refusal) -> None:
        """The daemon says that the send is over."""
        self.is_failed = True

    def change_mind(self) -> None:
        """The engine no longer wants it."""
        if not self.session.is_alive or self not in self.session.jobs:
            return
        if self._is_handed_over or (not self.lease and not self.send):
            self.cancel_call(self._call)
        elif self.send and not self.aux:
            self.is_failed = True

    def _abort(self, why: str) -> None:
        self.session.call(self.either, client.AbortSend, self.send, why)
        self._leave("aborted")

    def _leave(self, outcome: str) -> None:
        if self.lease and self.written and self.random() < 0.2:
            lease, self.lease = self.lease, 0
            self.session.call(self.done, client.ReleaseUpTo, lease, self.written)
        elif self.lease:
            self.let_go(commits=self.written == self.prompt.n_tokens and self.random() < 0.8)
        self.end(outcome)
