"""What the two kinds of jobs of an engine share: the request behind them, and their lease."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from typing_extensions import override

from kvd.sim.contents import Prompt
from kvd.sim.rows import EngineRows
from kvd.sim.violation import Violated, require
from kvd.types import NO_TOKENS, Tokens
from kvd.wire import client

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.errors import Refusal
    from kvd.sim.session import SimSession


class Request(msgspec.Struct, frozen=True):
    """What a router asked engines for: one that decodes, one at each source that sends its part.

    ``room`` 0: one engine alone, without a handoff. ``to``: the node that decodes, where the
    sources are told; every other router leaves that to the prompt.
    """

    room: int
    prompt: Prompt
    sources: tuple[str, ...]
    priority: int
    deadline_s: float
    cache: bool
    to: str | None = None


class EngineJob:
    """One request at one engine, from its first call to its last answer."""

    def __init__(self, session: SimSession, request: Request) -> None:
        self.session = session
        self.host = session.host
        self.request = request
        self.prompt = request.prompt
        self.lease = 0
        self.rows = EngineRows(self.host)
        self.agenda = self.host.world.agenda
        self.random = self.host.world.rng.random
        session.jobs.add(self)

    def end(self, outcome: str) -> None:
        """It is over, and this is how it ended."""
        self.session.jobs.discard(self)
        self.host.world.concluded(self, outcome)

    def slide(self, computed_tokens: int, then: Callable[[], None]) -> None:
        """Say how far it has computed, so that it can go on; ``then`` is called when it can."""

        def slid(reply: client.PageTable | client.Failed) -> None:
            if type(reply) is client.Failed:
                raise Violated(f"{self.host.name}: {self}: cannot slide: {reply.refusal.message}")
            assert type(reply) is client.PageTable
            self.rows.change(reply)
            require(
                self.rows.reach_tokens > computed_tokens,
                f"{self.host.name}: {self}: nothing is mapped beyond token {computed_tokens}",
            )
            if self.session.is_alive:
                then()

        self.session.call(slid, client.SlideLease, self.lease, computed_tokens)

    def done(self, reply: client.Done | client.Failed) -> None:
        """An answer that cannot be a refusal.

        Raises:
            Violated: It is one.
        """
        if type(reply) is client.Failed:
            raise Violated(f"{self.host.name}: {self}: {reply.refusal.message}")

    def either(self, _: client.Done | client.Failed) -> None:
        """An answer that may be a refusal, because what it names may be over already."""

    def let_go(self, tokens: Tokens = NO_TOKENS, *, commits: bool) -> None:
        """Release the lease, and commit what is written before that."""
        lease, self.lease = self.lease, 0
        if commits:
            self.session.call(self.done, client.CommitAndRelease, lease, tokens=tokens)
        else:
            self.session.call(self.done, client.ReleaseLease, lease)

    def cancel_call(self, number: int) -> None:
        """Nobody waits for that call any more."""
        self.session.call(self.done, client.CancelCall, number)

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__} of room {self.request.room}, lease {self.lease}"


def word(refusal: Refusal) -> str:
    """How a refusal counts."""
    return refusal.code.value
