"""Engines of two nodes that lease, compute, slide, send, receive, retract, resume and fetch.

Everything is drawn by the dice of one seed. What an engine is told it looks at: at each lease,
slide, commit, arrival, resumption and fetch its slots must hold what was written for its text.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from kvd.core import inputs
from kvd.core.layout.spec import Buffer, PerRequest, Tail
from kvd.errors import Code
from kvd.types import NO_TOKENS, Pages, Tokens, count, pack_ids, page_ids
from kvd.wire import client
from tests.property.drawn import Drawn
from tests.property.slots import Asked, Sequence, Standing, extents

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.core.side import Side

    Then = Callable[[client.Reply], None]

TEXT_TOKENS = 380


class Call(NamedTuple):
    """A request without an answer so far, and what its engine does with it."""

    side: Side
    life: int
    number: int
    kind: type[client.Request]
    then: Then


def nothing(reply: client.Reply) -> None:
    """Whatever is answered, the engine goes on as before."""


class Storm:
    """One seed of one family: two nodes and their engines."""

    def __init__(self, seed: int, family: str) -> None:
        self.rng = random.Random(f"{seed} {family}")
        self.promise_rng = random.Random(f"{seed} {family} promise")
        self.family = family
        self.done: Counter[str] = Counter()
        """How often each thing happened."""
        drawn = Drawn(family, self.rng)
        self.page = drawn.page
        self.world = drawn.world()
        self.sides = (self.world.p, self.world.d)
        self.sessions = {"p": 1, "d": 1}
        self.sequences: list[Sequence] = []
        self.calls: list[Call] = []
        self.receives: dict[tuple[str, int, int], Asked] = {}
        """By side, its life, and the number of the receive."""
        self.may_break = False
        """A copy was refused for no reason that a node can know."""
        self.rooms = 0
        """Handoffs so far."""
        self._texts = [[self.rng.randrange(2) for _ in range(TEXT_TOKENS)] for _ in range(3)]

    # ---- asking and hearing ------------------------------------------------------------------

    def call(
        self,
        side: Side,
        kind: type[client.Request],
        toks: Tokens = NO_TOKENS,
        then: Then = nothing,
        **fields: object,
    ) -> client.Reply | None:
        """One request, and what follows from it at once; the answer, if it has come."""
        side.calls += 1
        number = side.calls
        self.calls.append(Call(side, side.life, number, kind, then))
        message = kind(call=number, **fields)  # type: ignore[call-arg]
        session = self.sessions[side.name]
        side.feed(inputs.FromClient(self.world.now_s, session, message, toks))
        self.world.run()
        answer = side.answer(number)
        self.hear()
        return answer

    def hear(self) -> None:
        """Engines look at everything they were told."""
        asked, self.calls = self.calls, []
        for call in asked:
            answer = call.side.answer(call.number)
            if answer is None:
                self.calls.append(call)
                continue
            word = type(answer).__name__
            if isinstance(answer, client.Failed):
                word = answer.refusal.code.value
                assert self.may_break or answer.refusal.code is not Code.INTERNAL, answer.refusal
            self.done[f"{call.kind.__name__}: {word}"] += 1
            call.then(answer)
        for side in self.sides:
            for push in side.take():
                self._told(side, push)

    def _told(self, side: Side, push: client.Reply) -> None:
        match push:
            case client.Received():
                asked = self.receives.pop((side.name, side.life, push.receive))
                one = Sequence(side, push.lease, asked, len(asked.text))
                one.has_own_state = True
                self._begun(one, push.pages, push.beside)
            case client.ReceiveFailed(refusal=refusal):
                self.receives.pop((side.name, side.life, push.receive), None)
                unproven = refusal.code is Code.CORRUPT
                assert not unproven or "cannot be verified" in refusal.message, refusal
            case client.SendFailed():
                for one in self.sequences:
                    if one.side is side:
                        one.sends.pop(push.send, None)
            case _:
                return
        self.done[type(push).__name__] += 1

    def _begun(self, one: Sequence, pages: bytes, beside: tuple[bytes, ...]) -> None:
        one.rows = (pages, *beside)
        one.check()
        self.sequences.append(one)

    # ---- leases ------------------------------------------------------------------------------

    def text(self) -> list[int]:
        """One of few texts, up to some token, perhaps another one at its end."""
        rng, page = self.rng, self.page
        pages = page * rng.randint(1, 10)
        lengths = (rng.randint(1, 6), rng.randint(1, 14 * page), pages, pages - 1, pages + 1)
        found = rng.choice(self._texts)[: max(1, rng.choice(lengths))]
        if rng.random() < 0.4:
            found[-1] = rng.randrange(5)
        return found

    def asked(self) -> Asked:
        """What an engine asks room for."""
        steps = (0, 0, 1, self.page, 3 * self.page, 1000)
        reserves = (0, 0, 3, 2 * self.page)
        rng = self.rng
        promise = self.promise_rng.choice((0, 0, 1, self.page, 3 * self.page, 6 * self.page))
        return Asked(
            self.text(), rng.choice(("", "", "b")), rng.choice(steps), rng.choice(reserves), promise
        )

    def open(self, side: Side, asked: Asked, **fields: object) -> Sequence | None:
        """Ask for a lease; the sequence, if there is room at once."""
        opened: list[Sequence] = []

        def then(reply: client.Reply) -> None:
            if isinstance(reply, client.Leased):
                one = Sequence(side, reply.lease, asked, reply.prefix_tokens)
                is_computed = reply.prefix_tokens < len(asked.text)
                assert is_computed or not extents(side, Tail, PerRequest), "nothing is computed"
                self._begun(one, reply.pages, reply.beside)
                opened.append(one)
                self.done["prefix gone on from"] += reply.prefix_tokens > 0

        self.call(
            side,
            client.OpenLease,
            asked.tokens,
            then,
            namespace=asked.namespace,
            reserve_tokens=asked.reserve,
            step_tokens=asked.step,
            promise_tokens=asked.promise,
            **fields,
        )
        return opened[0] if opened else None

    def lease(self, side: Side) -> None:
        rng = self.rng
        more = {"cache": rng.random() < 0.85, "priority": rng.choice((0, 0, 1))}
        self.open(side, self.asked(), deadline_s=rng.choice((0.3, 5)), **more)

    def pass_through(self, side: Side) -> None:
        """A prompt and its answer from the first token to the cache."""
        asked = Asked(self.text(), "", self.rng.choice((0, 0, 1, self.page)), 4)
        one = self.open(side, asked, deadline_s=0.1)
        if one is not None:
            if self.rng.random() < 0.3:
                one.grow([self.rng.randrange(2) for _ in range(self.rng.randint(1, 4))])
            self.go_on(one, len(one.text))
            self.release(one, keep=one.written == len(one.text))

    def release(self, one: Sequence, *, keep: bool) -> None:
        """Its engine is done with it."""
        one.is_over = True
        self.sequences.remove(one)
        if keep:
            self.call(one.side, client.CommitAndRelease, one.unnamed, lease=one.lease)
        else:
            self.call(one.side, client.ReleaseLease, lease=one.lease)

    def rest(self, side: Side) -> None:
        """All that is running ends, so that what is cached is all there is; then a prompt comes."""
        for one in [one for one in self.sequences if one.side is side and one.is_running]:
            self.release(one, keep=one.written >= one.committed)
        self.pass_through(side)

    def go_on(self, one: Sequence, upto: int) -> None:
        """Compute in steps, and slide before each if it is a lease that does."""
        step = one.step or self.rng.choice((1, self.page, 1000))
        has_window = bool(extents(one.side, Tail))
        while one.written < upto:
            if has_window and (one.step or self.rng.random() < 0.3) and not self.slide(one):
                return
            one.compute(min(upto, one.written + step))

    def slide(self, one: Sequence) -> bool:
        """Give back what is behind its window; whether that was done."""
        at = one.written
        answer = self.call(
            one.side,
            client.SlideLease,
            then=lambda reply: self.see(one, reply),
            lease=one.lease,
            upto_tokens=at,
        )
        is_slid = isinstance(answer, client.PageTable)
        holders = one.side.node.leases.leases[one.lease].holders
        is_sent = any(holder.startswith("send") for holder in holders)
        assert is_slid or one.sends or is_sent, answer
        return is_slid

    def see(self, one: Sequence, reply: client.Reply) -> None:
        """Its rows have changed."""
        if isinstance(reply, client.PageTable) and not one.is_over:
            kv = one.rows[0][: len(pack_ids([0])) * reply.first] + reply.pages
            one.rows = (kv, *reply.beside)
            one.check()

    # ---- what an engine does with one that runs ----------------------------------------------

    def extend(self, one: Sequence) -> None:
        """Room for further tokens."""
        n_tokens = self.rng.randint(0, 2 * self.page)

        def then(reply: client.Reply) -> None:
            self.see(one, reply)
            one.room += n_tokens * isinstance(reply, client.PageTable)

        if not one.sends:
            is_sure = self._is_promised(one, n_tokens)
            answer = self.call(
                one.side, client.ExtendLease, then=then, lease=one.lease, n_tokens=n_tokens
            )
            assert not is_sure or isinstance(answer, client.PageTable), answer
            self.done["extended by promised tokens"] += is_sure

    def _is_promised(self, one: Sequence, n_tokens: int) -> bool:
        """Whether pages for so many more tokens cannot be short."""
        lease = one.side.node.leases.leases[one.lease]
        # A lease that came back with more tokens than it was promised is promised no more.
        return n_tokens > 0 and lease.room_tokens + n_tokens <= one.promised_to

    def compute(self, one: Sequence) -> None:
        """The prompt, or a few tokens after it."""
        if one.written < len(one.text):
            part = self.rng.randint(one.written, len(one.text))
            self.go_on(one, self.rng.choice((part, len(one.text))))
        elif not one.sends and len(one.text) < one.room:
            n_tokens = self.rng.randint(1, min(one.room - len(one.text), 3))
            one.grow([self.rng.randrange(2) for _ in range(n_tokens)])
            self.go_on(one, len(one.text))

    def commit(self, one: Sequence) -> None:
        """The node is told of the tokens that are written."""
        upto = one.written

        def then(reply: client.Reply) -> None:
            if isinstance(reply, client.PageTable):
                one.committed = upto
            self.see(one, reply)

        if upto >= one.committed and not one.sends:
            self.call(one.side, client.CommitLease, one.unnamed, then, lease=one.lease)

    def fetch(self, one: Sequence) -> None:
        """Pages come to the device, mostly with the one that is being written."""
        known = one.side.node.leases.leases[one.lease].written_tokens
        upto = min(known, one.written)
        n_pages = -(-upto // one.side.config.spec.components[0].page_size)
        if not n_pages or one.is_fetching or not extents(one.side, Buffer):
            return  # the next fetch may take the slots of the one before
        slots = one.side.node.fetcher._buffers.resident[one.lease].n_slots
        wanted = self.rng.sample(range(n_pages), min(n_pages, slots, self.rng.randint(1, 5)))
        if n_pages - 1 not in wanted and self.rng.random() < 0.7:
            wanted[0] = n_pages - 1
        ahead = self.rng.sample(range(n_pages), min(n_pages, self.rng.randint(0, 3)))

        def then(reply: client.Reply) -> None:
            one.is_fetching = False
            if isinstance(reply, client.FetchReply) and one.is_running:
                one.check_fetched(wanted, page_ids(Pages(reply.pages)), upto)

        one.is_fetching = True
        self.call(
            one.side,
            client.FetchPages,
            then=then,
            lease=one.lease,
            pages=pack_ids(wanted),
            ahead=pack_ids(ahead),
        )

    def decode(self, one: Sequence) -> None:
        """A few tokens, each committed and then looked at by the next: the last page grows."""
        if not extents(one.side, Buffer):
            return
        for _ in range(self.rng.randint(1, 4)):
            self.compute(one)
            self.commit(one)
            self.fetch(one)

    def retract(self, one: Sequence) -> None:
        """It goes out of the pool."""

        def then(reply: client.Reply) -> None:
            is_out = isinstance(reply, client.Retracted)
            one.standing = Standing.AWAY if is_out else Standing.RUNNING

        if one.written < one.committed or one.sends:
            return
        keep = self.rng.choice(("host", "host", "nothing"))
        one.is_kept = keep == "host"
        before, new = one.committed, one.unnamed
        one.cut()
        one.committed += count(new)
        one.standing = Standing.LEAVING
        answer = self.call(one.side, client.RetractLease, new, then, lease=one.lease, keep=keep)
        if isinstance(answer, client.Failed):
            one.committed = before

    def resume(self, one: Sequence) -> None:
        def then(reply: client.Reply) -> None:
            one.standing = Standing.AWAY
            if isinstance(reply, client.Resumed):
                one.standing = Standing.RUNNING
                one.rows = (reply.pages, *reply.beside)
                one.written = reply.kv_tokens
                one.has_own_state = one.is_kept and bool(extents(one.side, PerRequest))
                one.check()

        one.standing = Standing.COMING
        self.call(
            one.side,
            client.ResumeLease,
            then=then,
            lease=one.lease,
            deadline_s=self.rng.choice((0.3, 5)),
        )
