"""What engines are made of: the session, the jobs on it, and what a job has of its lease.

Calls are answered exactly once. A lease has a row of pages per component. Windows: its engine
computes a token only where a window page is mapped, and looks back at mapped ones only. States: it
copies the snapshot that it goes on from, then writes its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from typing_extensions import override

from kvd.core import inputs
from kvd.sim.contents import PAGE_TOKENS, WrittenPrompt
from kvd.sim.pool import STEPS_TOKENS
from kvd.sim.violation import Violated, require
from kvd.types import NO_TOKENS, Pages, Tokens, page_ids
from kvd.wire import client

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.errors import Refusal
    from kvd.sim.host import SimHost
    from kvd.sim.receiving import ReceivingEngine
    from kvd.sim.sending import SimSendingEngine
    from kvd.sim.worker import SimWorker

CALL_S = 0.0002
"""What a request is under way to its daemon; always the same, so that requests keep their order."""


class SimSession:
    """An engine, until it dies."""

    __slots__ = (
        *("_n_calls", "calls", "host", "id", "is_alive", "jobs", "receives", "sends"),
        "workers",
    )

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
        self.workers: list[SimWorker] = []
        """By rank: its processes that copy between pages and blocks of their own."""
        self._n_calls = 0

    def call(
        self,
        heard: Callable[[Any], None],
        kind: type[client.Request],
        *fields: object,
        tokens: Tokens = NO_TOKENS,
        begins: EngineJob | None = None,
    ) -> int:
        """Make a request; ``heard`` gets its answer. Returns the number of the call.

        ``begins``: whose lease begins with it, in the epoch that its daemon is in by then.
        """
        self._n_calls = number = self._n_calls + 1
        self.calls[number] = heard
        message = kind(number, *fields)  # type: ignore[arg-type]  # of its own kind
        self.host.world.agenda.after(CALL_S, self._submit, message, tokens, begins)
        return number

    def ask(self, kind: type[client.Request], *fields: object) -> client.Reply | None:
        """Make a request that is answered at once; None: it is not. Its daemon must be awake."""
        answers: list[client.Reply] = []
        self._n_calls = number = self._n_calls + 1
        self.calls[number] = answers.append
        self._submit(kind(number, *fields), NO_TOKENS)  # type: ignore[arg-type]  # of its own kind
        return answers[0] if answers else None

    def step_tokens(self) -> int:
        """What a new lease says of how far its engine computes between two slides."""
        world = self.host.world
        if not self.host.memory.kinds.windows:
            return 0
        return world.rng.choice(STEPS_TOKENS)

    def _submit(
        self, message: client.Request, tokens: Tokens, begins: EngineJob | None = None
    ) -> None:
        host = self.host
        agenda = host.world.agenda
        if not self.is_alive:
            return
        if host.asleep_until_s > agenda.now_s:
            agenda.at(host.asleep_until_s, self._submit, message, tokens, begins)
        else:
            if begins is not None and host.world.profile.has_epochs:
                prompt = begins.prompt
                begins.prompt = prompt.computed_in(host.epochs.said.get(prompt.namespace, 0))
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
            case client.Arriving():
                self.receives[reply.receive].arriving(reply)
            case client.ReceiveFailed():
                self.receives[reply.receive].failed(reply.refusal)
            case client.SendFailed():
                self.sends[reply.send].told(reply.refusal)
            case client.LeaseLost():
                raise Violated(f"{self.host.name}: {reply.refusal.message}")
            case client.Accepted() | client.Events() | client.PagesBack():
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


EVERYWHERE = 2**31


class EngineRows:
    """The rows of one lease, as its engine knows them."""

    def __init__(self, host: SimHost) -> None:
        self._host = host
        self.pages: list[int] = []
        """Of the first component, in units."""
        self.beside: tuple[list[int], ...] = ()

    def take(self, reply: client.Leased | client.Received | client.Resumed) -> None:
        """The daemon has given a lease its pages."""
        self.pages = self._host.memory.units(page_ids(Pages(reply.pages)))
        self._take_beside(reply.beside)

    def change(self, reply: client.PageTable) -> None:
        """The daemon has changed the row from some page on, and perhaps those beside it."""
        memory = self._host.memory
        self.pages[reply.first * memory.kinds.units :] = memory.units(page_ids(Pages(reply.pages)))
        self._take_beside(reply.beside)

    def drop(self) -> None:
        """All pages are others' now."""
        self.pages, self.beside = [], ()

    def _take_beside(self, beside: tuple[bytes, ...]) -> None:
        self.beside = tuple(page_ids(Pages(row)) for row in beside)

    # ---- reading -----------------------------------------------------------------------------

    def check(self, prompt: WrittenPrompt, n_tokens: int, what: str) -> None:
        """What is needed to go on behind the first ``n_tokens`` is there.

        Raises:
            Violated: A page holds something else, or is not there.
        """
        host, contents = self._host, prompt.upto(n_tokens)
        host.check(self.pages, contents, n_tokens, what)
        kinds = host.memory.kinds
        for number, name, window in kinds.windows:
            row = self.beside[number]
            first = max(0, n_tokens - window) // PAGE_TOKENS
            if not all(row[first : len(contents)]):
                raise Violated(f"{host.name}: {what}: null page in the window of {name}: {row}")
            mapped = [(page, due) for page, due in zip(row, contents, strict=False) if page]
            pages, dues = [page for page, _ in mapped], [due for _, due in mapped]
            host.check_beside(name, pages, dues, what)
        for number, name in kinds.states:
            if n_tokens:
                host.check_beside(name, self.beside[number][1:], contents[-1:], what)

    def go_on(self, prompt: WrittenPrompt, n_tokens: int, what: str) -> None:
        """A lease has begun behind ``n_tokens`` that are there: copy their state if it is shared.

        Raises:
            Violated: They are not there.
        """
        host = self._host
        for number, name in host.memory.kinds.states:
            source, own = self.beside[number]
            if source:
                host.check_beside(name, [source], prompt.upto(n_tokens)[-1:], what)
                held = host.memory.regions[name]
                held[own] = held[source]
        self.check(prompt, n_tokens, what)

    # ---- writing -----------------------------------------------------------------------------

    @property
    def reach_tokens(self) -> int:
        """How far the engine may compute without sliding on."""
        reach = EVERYWHERE
        for number, _, _ in self._host.memory.kinds.windows:
            row = self.beside[number]
            top = next((k for k in range(len(row), 0, -1) if row[k - 1]), 0)
            if top < len(row):
                reach = min(reach, top * PAGE_TOKENS)
        return reach

    @property
    def has_windows(self) -> bool:
        """Whether there is anything to slide."""
        return bool(self._host.memory.kinds.windows)

    def write(self, prompt: WrittenPrompt, start_tokens: int, upto_tokens: int) -> None:
        """Compute ``[start, upto)`` of the prompt and write all components of it."""
        host, contents = self._host, prompt.upto(upto_tokens)
        require(upto_tokens <= self.reach_tokens, f"{host.name}: computes beyond its window pages")
        host.memory.write(self.pages, contents, start_tokens)
        if upto_tokens <= start_tokens:
            return
        regions = host.memory.regions
        for number, name, _ in host.memory.kinds.windows:
            row = self.beside[number]
            for k in range(start_tokens // PAGE_TOKENS, len(contents)):
                require(row[k], f"{host.name}: page {k} of {name} is to be written: {row}")
                regions[name][row[k]] = contents[k]
        for number, name in host.memory.kinds.states:
            regions[name][self.beside[number][1]] = contents[-1]


class Request(msgspec.Struct, frozen=True):
    """What a router asked engines for: one that decodes, one at each source that sends its part.

    ``room`` 0: one engine alone, without a handoff. ``to``: the node that decodes, where the
    sources are told; every other router leaves that to the prompt.
    """

    room: int
    prompt: WrittenPrompt
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
