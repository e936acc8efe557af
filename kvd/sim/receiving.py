"""What a decode engine does: receive a prompt, read it, add tokens to it, let go.

Receive, received; extend, commit, extend, commit; perhaps retract, resume; release.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from kvd.sim.contents import PAGE_TOKENS
from kvd.sim.engine import EngineJob, Request, word
from kvd.sim.pool import BUFFER_TOKENS
from kvd.sim.violation import Violated, require
from kvd.types import Pages, Tokens, pack_ids, page_ids
from kvd.wire import client

if TYPE_CHECKING:
    from kvd.errors import Refusal
    from kvd.sim.engine import SimSession

RETRACTIONS = 0.15
"""Share of the steps of a generation at which it is interrupted for others."""

SLIDES = 0.2
"""Of those of a pool with windows, at which the engine says how far it is."""

FETCHES = 0.5
"""Of those of a pool with a device buffer, at which pages are wanted in it."""

HOLD_S = 0.3
"""Longest pause of an engine between two steps of a generation."""


class ReceivingEngine(EngineJob):
    """One prompt at its decode engine."""

    outcome = "delivered"
    """How one that ends well is counted."""

    def __init__(self, session: SimSession, request: Request) -> None:
        super().__init__(session, request)
        self.receive = 0
        self.turns = int(4 * self.random())
        """Of generation, still to come."""
        reserve = 20 if self.random() < 0.3 else 0
        self.tier = self._some_tier()
        self._call = session.call(
            self.asked,
            client.ReceiveRequest,
            request.room,
            request.sources,
            self.prompt.namespace,
            reserve,
            request.priority,
            request.deadline_s,
            request.cache,
            self.tier,
            session.step_tokens(),
            *("", 0, b"", 0, 0, False, request.room % 2 == 0),
            tokens=self.prompt.tokens,
            begins=self,
        )

    def _some_tier(self) -> str | None:
        """Where the prompt shall lie, where there is a choice."""
        if not self.host.memory.kinds.buffers:
            return None
        fits = self.prompt.n_tokens <= BUFFER_TOKENS
        return "device" if fits and self.random() < 0.5 else None

    def asked(self, reply: client.Receiving | client.Failed) -> None:
        """There is room and the offer is out, or it was refused."""
        if type(reply) is client.Failed:
            self.end(word(reply.refusal))
            return
        assert type(reply) is client.Receiving
        self.receive = reply.receive
        self.session.receives[self.receive] = self

    def arriving(self, reply: client.Arriving) -> None:
        """Some of it is here, and the KV of these tokens by now.

        Raises:
            Violated: It is not.
        """
        is_coming = self in self.session.jobs and not self.lease
        require(is_coming, f"{self.host.name}: {self}: arrives after its end")
        if reply.pages:
            self.rows.pages = self.host.memory.units(page_ids(Pages(reply.pages)))
        self.rows.check(self.prompt, reply.tokens, f"{self}: what has come")
        self.host.world.arrivals += 1

    def received(self, reply: client.Received) -> None:
        """The prompt is here: it is what the prefill engine wrote, with the aux of that send.

        Raises:
            Violated: Anything else.
        """
        world, request = self.host.world, self.request
        require(self in self.session.jobs, f"{self.host.name}: {self}: delivered after its end")
        require(not self.lease, f"{self.host.name}: {self}: delivered twice")
        sent = world.sent.get(reply.aux)
        if sent is None or reply.aux in world.delivered:
            raise Violated(f"{self.host.name}: {self}: aux {reply.aux!r} is nobody's, or old")
        world.delivered.add(reply.aux)
        if len(request.sources) > 1:
            world.joined.update([(request.room, source) for source in request.sources])
        mine = (request.room, self.prompt.tokens, self.prompt.key)
        theirs = (sent.request.room, sent.prompt.tokens, sent.prompt.key)
        require(mine == theirs, f"{self.host.name}: {self}: got {sent}, another prompt")
        self.lease = reply.lease
        self.rows.take(reply)
        self._read("a delivered prompt")
        if self.tier == "device":
            self._read_buffer(list(range(len(self.prompt.pages))), self.rows.beside[-1])
        self.agenda.after(HOLD_S * self.random(), self.go_on)

    def failed(self, refusal: Refusal) -> None:
        """It will not come."""
        require(self in self.session.jobs, f"{self.host.name}: {self}: failed after its end")
        require(not self.lease, f"{self.host.name}: {self}: failed after it was delivered")
        self.host.world.left.add(self.request.room)
        self.end(word(refusal))

    def change_mind(self) -> None:
        """The engine no longer wants it."""
        if not self.session.is_alive or self not in self.session.jobs or self.lease:
            return
        if self.receive:
            self.session.call(self.either, client.CancelReceive, self.receive)
        else:
            self.cancel_call(self._call)

    # ---- generation --------------------------------------------------------------------------

    def go_on(self) -> None:
        """Generate some more, or let go."""
        if not self.session.is_alive:
            return
        self._read("a lease")
        room_tokens = len(self.rows.pages) * PAGE_TOKENS - self.prompt.n_tokens
        reach_tokens = self.rows.reach_tokens - self.prompt.n_tokens
        if self.host.memory.kinds.buffers and self.random() < FETCHES:
            self._fetch()
        elif room_tokens > 0 and reach_tokens <= 0:
            self.slide(self.prompt.n_tokens, self.go_on)
        elif self.rows.has_windows and self.random() < SLIDES:
            self.slide(self.prompt.n_tokens, self._pause)
        elif self.turns <= 0:
            self._leave(room_tokens)
        elif self.random() < RETRACTIONS:
            self.turns -= 1
            keep = "host" if self.random() < 0.7 else "nothing"
            self.session.call(self.retracted, client.RetractLease, self.lease, keep)
        elif room_tokens > 4:
            self.turns -= 1
            self._generate(1 + int(min(room_tokens, reach_tokens - 1, 20) * self.random()))
        else:
            self.turns -= 1
            self.session.call(self.changed, client.ExtendLease, self.lease, PAGE_TOKENS)

    def changed(self, reply: client.PageTable | client.Failed) -> None:
        """There is room, or there is none: then it ends here."""
        if type(reply) is client.Failed:
            self.turns = 0
        else:
            assert type(reply) is client.PageTable
            self.rows.change(reply)
        self.agenda.after(HOLD_S * self.random(), self.go_on)

    def committed(self, reply: client.PageTable | client.Failed) -> None:
        """Whole pages have joined the tree: a commit of what was written never fails."""
        if type(reply) is client.Failed:
            raise Violated(f"{self.host.name}: {self}: {reply.refusal.message}")
        self.changed(reply)

    # ---- out of the pool and back ------------------------------------------------------------

    def retracted(self, reply: client.Retracted | client.Failed) -> None:
        """The pages are others' now; or there is no room to save them, and it goes on."""
        if type(reply) is client.Failed:
            self.agenda.after(HOLD_S * self.random(), self.go_on)
        else:
            self.rows.drop()
            self.agenda.after(HOLD_S * self.random(), self._resume)

    def _resume(self) -> None:
        if self.session.is_alive:
            number = self.session.call(
                self.resumed, client.ResumeLease, self.lease, self.request.deadline_s
            )
            if self.random() < self.host.world.profile.fickle:
                self.agenda.after(0.2 * self.random(), self._resume_no_more, number)

    def _resume_no_more(self, number: int) -> None:
        if self.session.is_alive and number in self.session.calls:
            self.cancel_call(number)

    def resumed(self, reply: client.Resumed | client.Failed) -> None:
        """Pages again: what was cached or saved is there, the rest is computed once more."""
        if type(reply) is client.Failed:
            self.let_go(commits=False)
            self.end("not-resumed")
            return
        assert type(reply) is client.Resumed
        self.rows.take(reply)
        self.rows.go_on(self.prompt, reply.kv_tokens, f"{self}: a resumed lease")
        self._compute_again(reply.kv_tokens)

    def _compute_again(self, start_tokens: int) -> None:
        """Write what came back without its KV, sliding on where it must."""
        stop = min(self.prompt.n_tokens, self.rows.reach_tokens)
        self.rows.write(self.prompt, start_tokens, stop)
        if stop < self.prompt.n_tokens:
            self.slide(stop, lambda: self._compute_again(stop))
        else:
            self._pause()

    def _generate(self, n_tokens: int) -> None:
        new = self.host.world.some_tokens(n_tokens)
        self._append(new)
        self.session.call(self.committed, client.CommitLease, self.lease, tokens=new)

    def _read(self, what: str) -> None:
        self.rows.check(self.prompt, self.prompt.n_tokens, f"{self}: {what}")

    def _append(self, new: Tokens) -> None:
        start = self.prompt.n_tokens
        self.prompt = self.prompt.followed_by(new)
        self.rows.write(self.prompt, start, self.prompt.n_tokens)

    def _pause(self) -> None:
        self.agenda.after(HOLD_S * self.random(), self.go_on)

    # ---- the device buffer -------------------------------------------------------------------

    def _fetch(self) -> None:
        """Want some pages of what is written in the buffer, and name some that may be wanted."""
        slots, rng = self.rows.beside[-1], self.host.world.rng
        pages = range(len(self.prompt.pages))
        wanted = rng.sample(pages, rng.randint(0, min(len(pages), len(slots))))
        ahead = rng.sample(pages, rng.randint(0, len(pages)))
        self.session.call(
            lambda reply: self._fetched(wanted, reply),
            client.FetchPages,
            self.lease,
            pack_ids(wanted),
            pack_ids(ahead),
        )

    def _fetched(self, wanted: list[int], reply: client.FetchReply | client.Failed) -> None:
        """They are there; or the copy was refused, which happens in bad weather."""
        if type(reply) is client.FetchReply:
            device = page_ids(Pages(reply.pages))
            slots = self.rows.beside[-1]
            require(set(slots).issuperset(device), f"{self}: fetched into {device}, has {slots}")
            require(len(set(device)) == len(wanted), f"{self}: {wanted} share pages: {device}")
            self._read_buffer(wanted, device)
        self._pause()

    def _read_buffer(self, logical: list[int], device: list[int]) -> None:
        """What is in these device pages is what is on those pages of the prompt."""
        ((_, name),) = self.host.memory.kinds.buffers
        dues = [self.prompt.pages[page] for page in logical]
        self.host.check_beside(name, device, dues, f"{self}: {logical} in its buffer")

    def _leave(self, room_tokens: int) -> None:
        dice = self.random()
        if room_tokens > 0 and dice < 0.3:
            new = self.host.world.some_tokens(1)
            self._append(new)
            self.let_go(new, commits=True)
        else:
            self.let_go(commits=dice < 0.9)
        self.host.world.heard_of(self.prompt)
        self.end(self.outcome)


class PullingEngine(ReceivingEngine):
    """One prompt of which one source has a beginning: that is pulled, and the rest computed."""

    @override
    def asked(self, reply: client.Receiving | client.Failed) -> None:
        """So much of it is or will be here, or it was refused."""
        if type(reply) is client.Receiving:
            n_tokens, prompt = reply.prompt_tokens, self.prompt
            whole = n_tokens is not None and n_tokens % PAGE_TOKENS == 0
            require(whole, f"{self.host.name}: {self}: {n_tokens} tokens are no whole pages")
            assert n_tokens is not None
            require(
                reply.prefix_tokens <= n_tokens <= prompt.n_tokens,
                f"{self.host.name}: {self}: {n_tokens} tokens, {reply.prefix_tokens} cached",
            )
            self.prompt = prompt.beginning(n_tokens)
            if n_tokens > reply.prefix_tokens:
                self.outcome = "pulled"
        super().asked(reply)

    @override
    def received(self, reply: client.Received) -> None:
        """It is what was cached over there, and there is room for the rest.

        Raises:
            Violated: Anything else.
        """
        require(self in self.session.jobs, f"{self.host.name}: {self}: pulled after its end")
        require(not self.lease, f"{self.host.name}: {self}: pulled twice")
        require(not reply.aux, f"{self.host.name}: {self}: an aux of nobody: {reply.aux!r}")
        self.lease = reply.lease
        self.rows.take(reply)
        asked = -(-self.request.prompt.n_tokens // PAGE_TOKENS)
        require(len(self.rows.pages) >= asked, f"{self.host.name}: {self}: too few pages")
        self._read("what was pulled")
        self.agenda.after(HOLD_S * self.random(), self.go_on)
