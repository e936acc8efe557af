"""Leases: what an engine computes in, from its first page to its release."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace
from mypy_extensions import mypyc_attr

from kvd.core.cache.lease import ENGINE, Claim, Shortage
from kvd.core.cache.lease_record import LeaseRecord
from kvd.core.engines.verbs import Verbs
from kvd.core.handoff.posts import no_event
from kvd.core.leases.admission import MemoryAsker, Waiter
from kvd.core.leases.arenas import REASON, no_run, unfit_pool
from kvd.core.leases.lease_events import tell_written
from kvd.core.leases.written import say_written
from kvd.core.tiers.promotion import UNTOLD
from kvd.core.tiers.words import NOW, bad_word
from kvd.errors import Code, Refusal
from kvd.types import NO_TOKENS, Tokens, count, slice_pages
from kvd.wire import client

if TYPE_CHECKING:
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.node_parts import NodeParts
    from kvd.core.outbox import Outbox
    from kvd.core.tiers.promotion import Promotions, TierWait


@mypyc_attr(allow_interpreted_subclasses=True)
class LeaseAsker(MemoryAsker):
    """An engine that asked for a plain lease: it waits for memory and nothing else."""

    __slots__ = ("_call", "_leases", "_out", "_promotions", "_session", "_waited")

    def __init__(
        self,
        session: int,
        call: int,
        leases: LeaseTable,
        promotions: Promotions,
        waited: TierWait | None,
        out: Outbox,
    ) -> None:
        self._leases = leases
        self._promotions = promotions
        self._waited = waited
        self._session = session
        self._call = call
        self._out = out

    def admitted(self, lease: LeaseRecord) -> None:
        """Answer with the lease."""
        told = self._promotions.told_of(lease, self._waited)
        self._out.answer(self._session, _leased(self._call, lease, self._leases, told))

    def refused(self, refusal: Refusal) -> None:
        """Answer with the reason."""
        self._out.answer(self._session, client.Failed(self._call, refusal))


@mypyc_attr(allow_interpreted_subclasses=True)
class LeaseVerbs(Verbs):
    """What an engine asks of its leases and arenas."""

    def __init__(self, node: NodeParts) -> None:
        super().__init__(node)
        self._grants = node.leases.grants
        self._commits = node.leases.commits
        self._holders = node.leases.holders
        self._admission = node.admission
        self._copies = node.engine_copies
        self._receives = node.receives
        self._tiers = node.tiers
        self._max_deadline_s = node.settings.max_deadline_s

    def open_lease(self, session: int, message: client.OpenLease, tokens: Tokens) -> Refusal | None:
        """Pages for a prompt, at once or when there is room."""
        if self._drainer.drain is not None:
            return self._drainer.refusal()
        reserve_tokens, step_tokens = message.reserve_tokens, message.step_tokens
        promise_tokens = message.promise_tokens
        # Asked of the common case in one go: none of the three is there.
        has_any = reserve_tokens or step_tokens or promise_tokens
        if (has_any and min(reserve_tokens, step_tokens, promise_tokens) < 0) or not (
            tokens or reserve_tokens
        ):
            return self._wrong(
                f"a lease of {count(tokens)} tokens, {reserve_tokens} in reserve and "
                f"{promise_tokens} promised, {step_tokens} at a time"
            )
        claim = _plain_claim(session, message, tokens)
        if self._tiers.each or message.tiers:
            return self._open_with_tiers(session, message, claim)
        lease = self._admission.at_once(claim)
        if isinstance(lease, LeaseRecord):
            self._out.answer(session, _leased(message.call, lease, self._leases))
            return None
        self._wait_for_lease(message, claim, lease, None)
        return None

    def _open_with_tiers(
        self, session: int, message: client.OpenLease, claim: Claim
    ) -> Refusal | None:
        """The same, where what is not in the pool may lie in a tier."""
        refusal = bad_word(message.tiers, self._name)
        if refusal is not None:
            return refusal
        promotions, waited = self._tiers.promotions, None
        if message.tiers != NOW:
            waited = promotions.wait_for(claim, self._deadline_of(message))
        lease = self._admission.at_once(claim) if waited is None else None
        if isinstance(lease, LeaseRecord):
            told = promotions.told_of(lease, None)
            self._out.answer(session, _leased(message.call, lease, self._leases, told))
            return None
        self._wait_for_lease(message, claim, lease, waited)
        return None

    def _wait_for_lease(
        self,
        message: client.OpenLease,
        claim: Claim,
        shortage: Shortage | None,
        waited: TierWait | None,
    ) -> None:
        asker = LeaseAsker(
            claim.session,
            message.call,
            self._leases,
            self._tiers.promotions,
            waited,
            self._out,
        )
        waiter = Waiter(claim, self._deadline_of(message), asker, waited)
        self._admission.submit(waiter, shortage)

    def _deadline_of(self, message: client.OpenLease) -> float:
        return self._out.at_s + min(self._max_deadline_s, message.deadline_s)

    def hold_prefix(
        self, session: int, message: client.HoldPrefix, tokens: Tokens
    ) -> Refusal | None:
        """What is cached of a prompt, locked; no pages for the rest."""
        if self._drainer.drain is not None:
            return self._drainer.refusal()
        opening = client.OpenLease(
            call=message.call,
            namespace=message.namespace,
            priority=message.priority,
            cache=message.cache,
        )
        # Not through the queue: who waits there waits for pages, and this takes none of them.
        lease = self._grants.open_prefix(_plain_claim(session, opening, tokens))
        if not isinstance(lease, LeaseRecord):
            return self._no_room("a cached prefix", lease)
        told = self._tiers.promotions.told(tokens, message.namespace, lease.prefix_tokens)
        self._out.answer(session, _leased(message.call, lease, self._leases, (0, *told)))
        return None

    def open_arena(self, session: int, message: client.OpenArena, _: Tokens) -> Refusal | None:
        """A run of pages whose use the engine decides."""
        refusal = self._drainer.refusal() or unfit_pool(self._leases, self._name)
        if refusal is not None:
            return refusal
        if message.n_pages < 1:
            return self._wrong(f"an arena of {message.n_pages} pages")
        # Its namespace is none: what its pages hold is told with each send and receive.
        opening = client.OpenLease(call=message.call, cache=False)
        claim = _plain_claim(session, opening, NO_TOKENS)
        claim = replace(claim, reason=REASON)
        # Now or not at all: who waits in the queue waits for pages anywhere.
        arena = self._grants.open_arena(claim, message.n_pages)
        if arena is None:
            return no_run(self._leases, message.n_pages, self._name)
        self._out.answer(session, _leased(message.call, arena, self._leases))
        return None

    def extend_lease(self, session: int, message: client.ExtendLease, _: Tokens) -> Refusal | None:
        """Pages for more tokens, now or not at all."""
        lease = self._owners.running_lease_of(session, message.lease)
        if isinstance(lease, Refusal):
            return lease
        if message.n_tokens < 0:
            return self._wrong(f"extend by {message.n_tokens} tokens")
        # Before it grows: the answer has the new pages only.
        first = count(lease.page_table)
        shortage = self._grants.extend(lease, message.n_tokens)
        if shortage is not None:
            return self._no_room(f"lease {lease.id}", shortage)
        self._answer_page_table(session, message.call, lease, first)
        return None

    def slide_lease(self, session: int, message: client.SlideLease, _: Tokens) -> Refusal | None:
        """Pages below that token are left behind where a window has gone on."""
        lease = self._owners.running_lease_of(session, message.lease)
        if isinstance(lease, Refusal):
            return lease
        if not 0 <= message.upto_tokens <= lease.room_tokens:
            return self._wrong(
                f"slide of lease {lease.id} to token {message.upto_tokens}, it has room for "
                f"{lease.room_tokens}"
            )
        refusal = self._grants.slide(lease, message.upto_tokens)
        if refusal is None:
            # From the end of the row on: a slide moves nothing of the first component.
            self._answer_page_table(session, message.call, lease, count(lease.page_table))
        return refusal

    def commit_lease(
        self, session: int, message: client.CommitLease | client.CommitUpTo, tokens: Tokens
    ) -> Refusal | None:
        """More tokens are known: whole pages of what is written join the tree."""
        lease = self._owners.running_lease_of(session, message.lease)
        if isinstance(lease, Refusal):
            return lease
        if type(message) is client.CommitUpTo:
            first = self._commits.commit(lease, tokens, message.upto_tokens, swaps=message.swaps)
        else:
            first = self._commits.commit(lease, tokens)
        if isinstance(first, Refusal):
            return first
        self._answer_page_table(session, message.call, lease, first)
        return None

    def commit_and_extend(
        self, session: int, message: client.CommitAndExtend, tokens: Tokens
    ) -> Refusal | None:
        """Both, or neither where there is no room."""
        lease = self._owners.running_lease_of(session, message.lease)
        if isinstance(lease, Refusal):
            return lease
        if message.extend_tokens < 0:
            return self._wrong(f"extend by {message.extend_tokens} tokens")
        first = self._grants.commit_and_extend(
            lease, tokens, message.extend_tokens, message.upto_tokens, swaps=message.swaps
        )
        if isinstance(first, Refusal):
            return first
        if isinstance(first, Shortage):
            return self._no_room(f"lease {lease.id}", first)
        self._answer_page_table(session, message.call, lease, first)
        return None

    def say_written(self, session: int, message: client.SayWritten, _: Tokens) -> Refusal | None:
        """A rank says how far it has written; its session hears that this was taken."""
        refusal = self.take_word(session, message)
        if refusal is None:
            self._out.answer(session, client.Done(message.call))
        return refusal

    def take_word(self, session: int, message: client.SayWritten) -> Refusal | None:
        """How far one rank has written a lease; sends of its prompt go on by it."""
        lease = self._owners.running_lease_of(session, message.lease)
        if isinstance(lease, Refusal):
            return lease
        refusal = no_event(message.after, self._name)
        if refusal is not None:
            return refusal
        room_tokens = count(lease.page_table) * self._leases.page_size
        # The slowest rank counts: most words of one move nothing that others could see.
        before = lease.written_tokens
        refusal = say_written(lease, message, room_tokens)
        if refusal is None:
            self._sessions.by_id[session].dead_ranks.pop(message.rank, None)  # somebody speaks
            if lease.written_tokens > before:
                tell_written(self._out, lease)
            self._sends.lease_written(lease)
        return refusal

    def release_lease(
        self, session: int, message: client.ReleaseLease, _: Tokens
    ) -> Refusal | None:
        """The lease ends; nothing more of it is known than was committed."""
        lease = self._owners.lease_of(session, message.lease)
        if isinstance(lease, Refusal):
            return lease
        if lease.is_arena:
            why = f"its arena {lease.id} was closed"
            refusal = Refusal(Code.CANCELLED, why, side=self._name)
            for attempt in self._receives.lent(lease.id):
                self._decoder.cancel_attempt(attempt, refusal)
        self._release(session, message.call, lease)
        return None

    def commit_and_release(
        self, session: int, message: client.CommitAndRelease | client.ReleaseUpTo, tokens: Tokens
    ) -> Refusal | None:
        """The last tokens are known, and the lease ends."""
        lease = self._owners.running_lease_of(session, message.lease)
        if isinstance(lease, Refusal):
            # An engine that is back after a restart ends its leases the way it always did.
            former = self._owners.former_lease_of(session, message.lease)
            if former is None or tokens:
                return lease
            self._release(session, message.call, former)
            return None
        upto_tokens = None
        if type(message) is client.ReleaseUpTo:
            upto_tokens = message.upto_tokens
        elif not self._sessions.is_asked_about(lease) and self._holders.commit_and_release(
            lease, tokens
        ):
            if self._decoder.open.ready:
                self._decoder.lease_ended(lease.id)
            self._out.answer(session, client.Done(message.call))
            return None
        first = self._commits.commit(lease, tokens, upto_tokens)
        if isinstance(first, Refusal):
            return first
        lease.is_whole = self._copies.is_whole(lease)
        self._release(session, message.call, lease)
        return None

    def _release(self, session: int, call: int, lease: LeaseRecord) -> None:
        # Before ``Done``: effects are in order, so what its engine hears has been noted by then.
        self._sessions.end_lease(lease, "normal")
        self._out.answer(session, client.Done(call))

    def _answer_page_table(self, session: int, call: int, lease: LeaseRecord, first: int) -> None:
        beside = self._leases.components.page_tables(lease)
        self._out.answer(
            session,
            client.PageTable(
                call=call, first=first, pages=slice_pages(lease.page_table, first), beside=beside
            ),
        )

    def _no_room(self, what: str, shortage: Shortage) -> Refusal:
        who = "; ".join(self._owners.of_most_pages(shortage.budget))
        obtainable = shortage.obtainable_pages
        needed = obtainable + shortage.missing_pages  # to lock promised pages is to need them
        return Refusal(
            Code.NO_ROOM,
            f"{what} needs {needed} more pages of {shortage.budget}, {obtainable} are obtainable "
            f"({self._leases.budgets.told(shortage.budget)}); most are held by {who}",
            side=self._name,
            numbers={"needed_pages": needed, "headroom_pages": obtainable},
        )


def _plain_claim(session: int, message: client.OpenLease, tokens: Tokens) -> Claim:
    """What an engine asks for with it."""
    # By position, in the order of the class: by name it takes twice as long, for every lease.
    return Claim(
        session,
        message.call,
        "lease",
        0,
        message.namespace,
        tokens,
        message.reserve_tokens,
        message.priority,
        message.cache,
        ENGINE,
        0,
        None,
        None,
        message.step_tokens,
        message.promise_tokens,
    )


def _leased(
    call: int, lease: LeaseRecord, leases: LeaseTable, told: tuple[int, int, float] = UNTOLD
) -> client.Leased:
    """The answer that names the lease and its pages; ``told`` of tiers."""
    components = leases.components
    beside = components.page_tables(lease) if components.each else ()
    promised = 0 if lease.promise is None else lease.promised_tokens
    # By position, as above.
    return client.Leased(
        call,
        lease.id,
        lease.prefix_tokens,
        lease.page_table,
        beside,
        promised,
        told[0],
        told[1],
        told[2],
    )
