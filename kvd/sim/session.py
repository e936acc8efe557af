"""One engine session: it makes calls, and hears exactly one answer to each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvd.core import inputs
from kvd.sim.pool import STEPS_TOKENS
from kvd.sim.violation import Violated
from kvd.types import NO_TOKENS, Tokens
from kvd.wire import client

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.sim.host import SimHost
    from kvd.sim.job import EngineJob
    from kvd.sim.receiving import ReceivingEngine
    from kvd.sim.sending import SimSendingEngine

CALL_S = 0.0002
"""What a request is under way to its daemon; always the same, so that requests keep their order."""


class SimSession:
    """An engine, until it dies."""

    __slots__ = ("_n_calls", "calls", "host", "id", "is_alive", "jobs", "receives", "sends")

    def __init__(self, host: SimHost, session_id: int) -> None:
        self.host = host
        self.id = session_id
        self.is_alive = True
        # Any: each waits for its own answer.
        self.calls: dict[int, Callable[[Any], None]] = {}
        """Who waits for the answer to each call."""
        self.jobs: set[EngineJob] = set()
        """Not over yet."""
        self.sends: dict[int, SimSendingEngine] = {}
        self.receives: dict[int, ReceivingEngine] = {}
        self._n_calls = 0

    def call(
        self,
        heard: Callable[[Any], None],
        kind: type[client.Request],
        *fields: object,
        tokens: Tokens = NO_TOKENS,
    ) -> int:
        """Make a request; ``heard`` gets its answer. Returns the number of the call."""
        self._n_calls = number = self._n_calls + 1
        self.calls[number] = heard
        message = kind(number, *fields)  # type: ignore[arg-type]  # of its own kind
        self.host.world.agenda.after(CALL_S, self._submit, message, tokens)
        return number

    def step_tokens(self) -> int:
        """What a new lease says of how far its engine computes between two slides."""
        world = self.host.world
        if not self.host.memory.kinds.windows:
            return 0
        return world.rng.choice(STEPS_TOKENS)

    def _submit(self, message: client.Request, tokens: Tokens) -> None:
        host = self.host
        agenda = host.world.agenda
        if not self.is_alive:
            return
        if host.asleep_until_s > agenda.now_s:
            agenda.at(host.asleep_until_s, self._submit, message, tokens)
        else:
            host.feed(
                inputs.FromClient(
                    at_s=agenda.now_s, session=self.id, message=message, tokens=tokens
                )
            )

    def heard(self, reply: client.Reply) -> None:
        """The daemon says something.

        Raises:
            Violated: It answers what was not asked, or was answered before.
        """
        match reply:
            case client.Received():
                self.receives[reply.receive].received(reply)
            case client.ReceiveFailed():
                self.receives[reply.receive].failed(reply.refusal)
            case client.SendFailed():
                self.sends[reply.send].told(reply.refusal)
            case client.LeaseLost():
                raise Violated(f"{self.host.name}: {reply.refusal.message}")
            case client.Accepted() | client.Events():
                pass
            case _:
                waits = self.calls.pop(reply.call, None)
                if waits is None:
                    raise Violated(f"{self.host.name}: nobody waits for {reply}: answered twice?")
                waits(reply)

    def die(self) -> None:
        """Its last process is gone; nobody hears anything, nobody does anything more."""
        self.is_alive = False
        for job in self.jobs:
            self.host.world.concluded(job, "engine-died")
            self.host.world.left.add(job.request.room)
        self.jobs = set()
