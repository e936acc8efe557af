"""Retraction: a running lease gives its pages back, and takes them again later.

Out: the pages that hold its tokens are copied to the saved area, then its lock and its pages go,
and what it had cached stays cached like anybody's. Back: it waits in the one admission queue before
every new request, matches the tree again, and only what the tree no longer has is copied back; of
other components, a window or a state, all is copied back.

The lease keeps its number throughout; its state follows ``lease_state.LEASE_STAGES``, and pages
move in ``saved_area`` and ``retracted``. There is a copy, a ticket of the transfer process, for
each component with bytes. It is over by its report or by the end of the process. A lease goes on
when all of its copies are over, and until then neither side's pages are anybody else's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.cache.lease import ENGINE, RESTORE, Claim, Shortage
from kvd.core.cache.lease_record import LeaseRecord
from kvd.core.cache.lease_state import LeaseStage, LeaseTransition
from kvd.core.leases.admission import MemoryAsker, Waiter
from kvd.core.leases.copies import LeaseCopies
from kvd.core.leases.owners import describe_holder
from kvd.core.leases.written import said_tokens
from kvd.errors import Code, Refusal
from kvd.types import Tokens, count
from kvd.wire import client, events

if TYPE_CHECKING:
    from kvd.core.inputs import Copied, CopyFailed
    from kvd.core.leases.admission import Admission
    from kvd.core.leases.copies import Copies, OwnTransfer
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.leases.owners import Owners
    from kvd.core.leases.saved_area import SavedMove
    from kvd.core.outbox import Outbox
    from kvd.core.settings import Settings

HOST = "host"
"""Keep the bytes in the saved area."""

NOTHING = "nothing"
"""Keep the tokens only: what the tree loses until then must be computed again."""

KEEPS = (HOST, NOTHING)

HOLDERS_NAMED = 3
"""Of the leases with the most saved pages, in a refusal."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Caller:
    """The call that waits for a retraction or a resumption, and since when."""

    __slots__ = ("call", "session", "since_s", "waiter")

    def __init__(self, session: int, call: int, since_s: float) -> None:
        self.session = session
        self.call = call
        self.since_s = since_s
        self.waiter: Waiter | None = None


@mypyc_attr(allow_interpreted_subclasses=True)
class ResumeAsker(MemoryAsker):
    """A retracted lease in the queue: it waits for memory and nothing else."""

    __slots__ = ("_lease", "_retractor")

    def __init__(self, retractor: Retractor, lease: LeaseRecord) -> None:
        self._retractor = retractor
        self._lease = lease

    def admitted(self, lease: LeaseRecord) -> None:
        """RESUMING -> RESTORING, or RUNNING at once."""
        self._retractor.admitted(lease)

    def refused(self, refusal: Refusal) -> None:
        """RESUMING -> RETRACTED."""
        self._retractor.not_admitted(self._lease, refusal)


@mypyc_attr(allow_interpreted_subclasses=True)
class Retractor:
    """Leases on their way out of the pool and back."""

    def __init__(
        self,
        settings: Settings,
        leases: LeaseTable,
        owners: Owners,
        admission: Admission,
        transfer: OwnTransfer,
        copies: Copies,
        out: Outbox,
    ) -> None:
        self.copies = LeaseCopies(settings.spec, copies)
        self.uncopied: dict[int, LeaseRecord] = {}
        """By lease id: to be restored as soon as a transfer process serves."""
        self.retracted = self.resumed = 0
        self.restored_bytes = self.spared_bytes = 0
        self.callers: dict[int, Caller] = {}
        self._leases = leases
        self._owners = owners
        self._admission = admission
        self._transfer = transfer
        self._out = out
        self._name = settings.name
        self._max_deadline_s = settings.max_deadline_s

    # ---- out ---------------------------------------------------------------------------------

    def retract(
        self, session: int, message: client.RetractLease, new_tokens: Tokens
    ) -> Refusal | None:
        """Save what the lease holds, or not, and free its pages; or say why nothing was changed."""
        owners = self._owners
        # Asked first, because to the other question a lease that is being received is not the
        # session's at all, and the answer would hide that it is there (scenario A36).
        lease = owners.arriving(session, message.lease) or owners.running_lease_of(
            session, message.lease
        )
        if isinstance(lease, Refusal):
            return lease
        table = self._leases
        tokens = Tokens(lease.tokens + new_tokens)
        refusal = self._unfit(lease, message, tokens)
        if refusal is not None:
            return refusal
        caller = Caller(session, message.call, self._out.at_s)
        if message.keep == NOTHING or not tokens:
            # Counted before they go.
            freed_pages = lease.held_pages
            table.retracted.leave(lease, tokens)
            self._told_retracted(lease, caller, freed_pages)
            return None
        found = table.retracted.begin_save(lease, tokens)
        if isinstance(found, Shortage):
            return self._no_room(lease, found)
        if found is not None:
            return found
        self.callers[lease.id] = caller
        self.copies.save(self, lease, table.saved.to_save(lease))
        return None

    def _unfit(
        self, lease: LeaseRecord, message: client.RetractLease, tokens: Tokens
    ) -> Refusal | None:
        """Why the lease cannot be retracted now, or not like this."""
        if message.keep not in KEEPS:
            return self._refusal(Code.BAD_REQUEST, f"keep={message.keep!r} is none of {KEEPS}")
        # Whoever reads its pages holds it or is counted: they are not given away under a post.
        if lease.holders != {ENGINE} or lease.reads:
            who = ", ".join(sorted(lease.holders - {ENGINE})) or "a post"
            return self._refusal(
                Code.WRONG_STATE,
                f"lease {lease.id} is read by {who}: finish or abort that before retracting it",
            )
        room_tokens = count(lease.page_table) * self._leases.page_size
        if count(tokens) > room_tokens:
            return self._refusal(
                Code.BAD_REQUEST,
                f"retract of {count(tokens)} tokens on lease {lease.id}, which holds pages for "
                f"{room_tokens}: extend it before writing",
            )
        by_word = self._leases.commits.counts_by_word(lease)
        if message.keep == HOST and by_word and count(tokens) > said_tokens(lease):
            return self._refusal(
                Code.BAD_REQUEST,
                f"retract of {count(tokens)} tokens on lease {lease.id}, of which "
                f"{said_tokens(lease)} are said to be written: say so of the others first, or "
                "retract with keep='nothing'",
            )
        # Refused, where a restore is put off: the lease runs on meanwhile, and what is saved later
        # would no longer be what was named now.
        if message.keep == HOST and tokens and not self._transfer.generation:
            return self._refusal(
                Code.ABORTED,
                f"the transfer process is restarting, so lease {lease.id} cannot be saved now: it "
                "runs on; retract it again",
            )
        return None

    def _no_room(self, lease: LeaseRecord, shortage: Shortage) -> Refusal:
        area = self._leases.saved.pools[shortage.budget]
        holding = [lease for lease in self._leases.leases.values() if lease.saved_pages]
        holding.sort(key=lambda one: -one.saved_pages)
        who = "; ".join(
            f"{describe_holder(self._owners, lease)} ({lease.saved_pages} saved pages)"
            for lease in holding[:HOLDERS_NAMED]
        )
        return Refusal(
            Code.NO_ROOM,
            f"saving lease {lease.id} takes {shortage.needed_pages} pages of {area.name}, "
            f"{area.free_pages} of {area.total_pages - 1} are free"
            f"{f'; most are held by {who}' if who else ''}: "
            "resume or release one, retract with keep='nothing', or raise pool.saved_size",
            side=self._name,
            numbers={"needed_pages": shortage.needed_pages, "free_pages": area.free_pages},
        )

    # ---- and back ----------------------------------------------------------------------------

    def resume(self, session: int, message: client.ResumeLease, _: Tokens) -> Refusal | None:
        """Queue for room, before every new request."""
        lease = self._owners.lease_of(session, message.lease)
        if isinstance(lease, Refusal):
            return lease
        if lease.lost is not None or lease.state is LeaseStage.FORMER:
            return lease.lost or self._owners.before_restart(lease)
        if lease.state is not LeaseStage.RETRACTED:
            return self._refusal(
                Code.WRONG_STATE,
                f"lease {lease.id} is {lease.state.value}: only a retracted one can resume",
            )
        # Before it is queued: a second call for the same lease finds it RESUMING and is refused.
        self._leases.retracted.turn(lease, LeaseTransition.RESUME)
        claim = Claim(
            session=session,
            call=message.call,
            reason=lease.reason,
            room=lease.room,
            namespace=lease.namespace,
            tokens=lease.tokens,
            reserve_tokens=lease.room_tokens - count(lease.tokens),
            priority=lease.priority,
            cache=lease.cache,
            resumes=lease.id,
            # What such a lease computed beyond its prefix is its own, whatever others cached.
            match_tokens=None if lease.cache else lease.prefix_tokens,
            fresh_tokens=self._fresh_tokens(lease),
            step_tokens=lease.step_tokens,
            promise_tokens=lease.promised_tokens,
        )
        caller = Caller(session, message.call, self._out.at_s)
        wait_s = min(self._max_deadline_s, message.deadline_s)
        asker = ResumeAsker(self, lease)
        caller.waiter = Waiter(claim, self._out.at_s + wait_s, asker)
        # Before it is asked for: a lease that is admitted at once looks for its caller.
        self.callers[lease.id] = caller
        found = self._admission.at_once(claim)
        if isinstance(found, LeaseRecord):
            self.admitted(found)
        else:
            self._admission.submit(caller.waiter, found)
        return None

    def admitted(self, lease: LeaseRecord) -> None:
        """It has a lock and pages again: restore what the tree did not give it."""
        retracted = self._leases.retracted
        caller = self.callers[lease.id]
        # It has left the queue: if the lease ends while it is restored there is nothing to
        # withdraw.
        caller.waiter = None
        moved = self._leases.saved.to_restore(lease)
        if isinstance(moved, Refusal):
            # The tree gave it less than it had, and what is missing was never saved: better none
            # of it than pages that hold somebody else's bytes.
            retracted.give_up(lease)
            self._answer_failed(lease, moved)
            return
        if moved:
            retracted.begin_restore(lease)
            self._restore(lease, moved)
            return
        # Both are read of what is saved, which ``complete`` drops.
        spared_bytes = lease.saved_bytes
        kv_tokens = self._kv_tokens(lease)
        retracted.complete(lease)
        del self.callers[lease.id]
        self._told_resumed(lease, caller, kv_tokens, 0, spared_bytes)

    def not_admitted(self, lease: LeaseRecord, refusal: Refusal) -> None:
        """It stays retracted, and what is saved of it stays saved."""
        self._leases.retracted.turn(lease, LeaseTransition.GIVEN_UP)
        self._answer_failed(lease, refusal)

    def _restore(self, lease: LeaseRecord, moved: list[SavedMove]) -> None:
        """Order the copies now, or as soon as a transfer process serves."""
        # Its pages are held meanwhile and in no one's way: the next process restores it.
        if not self._transfer.generation:
            self.uncopied[lease.id] = lease
            return
        self.copies.restore(self, lease, moved)

    def _fresh_tokens(self, lease: LeaseRecord) -> int | None:
        """From where on it gets windows and states back; None: it goes on from the tree's."""
        if lease.saved is None or not self._leases.components.each:
            return None
        return lease.saved.fresh_tokens

    def _kv_tokens(self, lease: LeaseRecord) -> int:
        """Tokens whose KV the lease has once it runs again."""
        if lease.saved is None:
            return lease.prefix_tokens
        return max(count(lease.saved.tokens), lease.prefix_tokens)

    # ---- copies ------------------------------------------------------------------------------

    def copied(self, got: Copied) -> None:
        """One copy is done."""
        self._over(got.ticket, got.n_bytes, "")

    def copy_failed(self, got: CopyFailed) -> None:
        """A copy was refused: nothing was written."""
        self._over(got.ticket, 0, got.why)

    def _over(self, ticket: int, n_bytes: int, why: str) -> None:
        """After the last copy of a lease it goes on, or back."""
        all_over = self.copies.over(ticket, n_bytes, why)
        if all_over is None:
            return
        if all_over.why:
            self._refused(all_over.lease, all_over.why)
        elif all_over.lease.state is LeaseStage.SAVING:
            self._saved(all_over.lease)
        else:
            self._restored(all_over.lease, all_over.n_bytes)

    def _saved(self, lease: LeaseRecord) -> None:
        # No caller: its engine has let go meanwhile, and the copy only held the pages to its end.
        caller, freed_pages = self.callers.pop(lease.id, None), lease.held_pages
        self._leases.retracted.end_save(lease)
        if caller is not None:
            self._told_retracted(lease, caller, freed_pages)

    def _restored(self, lease: LeaseRecord, n_bytes: int) -> None:
        caller, kv_tokens = self.callers.pop(lease.id, None), self._kv_tokens(lease)
        # Before ``end_restore``, which drops what is saved; so is ``kv_tokens`` above.
        spared_bytes = lease.saved_bytes - n_bytes
        self._leases.retracted.end_restore(lease)
        if caller is not None and lease.lost is not None:
            # Its row is cut: what was copied back stands in pages that nobody uses any more.
            self._out.answer(caller.session, client.Failed(caller.call, lease.lost))
        elif caller is not None:
            self._told_resumed(lease, caller, kv_tokens, n_bytes, spared_bytes)

    def _refused(self, lease: LeaseRecord, why: str) -> None:
        """One of its copies was refused, so the others are for nothing.

        It is called when the last of them is over: until then they write.
        """
        refusal = self._refusal(
            Code.INTERNAL, f"the transfer process refused to copy lease {lease.id}: {why}"
        )
        if lease.state is LeaseStage.SAVING:
            self._leases.retracted.cut_save(lease)
        else:
            self._leases.retracted.undo_restore(lease)
        self._answer_failed(lease, refusal)

    def transfer_gone(self) -> None:
        """The process is reaped: what it saved is not whole, what it restored is done again."""
        retracted = self._leases.retracted
        for lease in self.copies.cut():
            if lease.state is LeaseStage.SAVING:
                retracted.cut_save(lease)
                self._answer_failed(
                    lease,
                    self._refusal(
                        Code.ABORTED,
                        f"the transfer process ended while lease {lease.id} was saved: it runs on "
                        "as before; retract it again",
                    ),
                )
            elif ENGINE in lease.holders:
                # It keeps its pages; what stands in them is anything, so all is copied again.
                retracted.turn(lease, LeaseTransition.CUT)
                self.uncopied[lease.id] = lease
            else:
                # Its engine has let go of it: only the copy held it, and nobody wants it restored.
                retracted.undo_restore(lease)

    def transfer_ready(self) -> None:
        """The next generation serves: restore what waited for it."""
        # Emptied first: ``_restore`` puts one back where no process serves.
        waiting, self.uncopied = self.uncopied, {}
        for lease in waiting.values():
            # Its pages are nobody's any more, so nothing is copied over them, and no copy would say
            # that it is over: it stays until its engine lets go of it (``lease_ends``).
            if lease.lost is not None:
                self.uncopied[lease.id] = lease
                self._answer_failed(lease, lease.lost)
                continue
            moved = self._leases.saved.to_restore(lease)
            assert not isinstance(moved, Refusal), "it was looked at when it was admitted"
            self._restore(lease, moved)

    # ---- the engine lets go ------------------------------------------------------------------

    def lease_ends(self, lease: LeaseRecord) -> None:
        """Its engine releases it or is dead: who waits for it is told, a copy under way goes on."""
        caller = self.callers.pop(lease.id, None)
        if caller is not None:
            if caller.waiter is not None:
                self._admission.withdraw(caller.waiter)
            # A session that is over was taken off the table first: nobody hears of its requests.
            if caller.session in self._owners.sessions.by_id:
                refusal = self._refusal(Code.CANCELLED, f"lease {lease.id} was released meanwhile")
                self._out.answer(caller.session, client.Failed(caller.call, refusal))
        # No copy was ordered yet, so no report will ever let go of it.
        if self.uncopied.pop(lease.id, None) is not None:
            self._leases.holders.release(lease, RESTORE, "released")

    # ---- what is said ------------------------------------------------------------------------

    def _told_retracted(self, lease: LeaseRecord, caller: Caller, freed_pages: int) -> None:
        saved_bytes = lease.saved_bytes
        self.retracted += 1
        out = self._out
        out.emit(
            events.LeaseRetracted(
                lease=lease.id,
                session=lease.session,
                kv_tokens=count(lease.tokens),
                freed_pages=freed_pages,
                saved_pages=lease.saved_pages,
                saved_bytes=saved_bytes,
                took_s=out.at_s - caller.since_s,
            )
        )
        out.answer(caller.session, client.Retracted(caller.call, lease.saved_pages, saved_bytes))

    def _told_resumed(
        self,
        lease: LeaseRecord,
        caller: Caller,
        kv_tokens: int,
        restored_bytes: int,
        spared_bytes: int,
    ) -> None:
        restored_tokens = kv_tokens - lease.prefix_tokens
        self.resumed += 1
        self.restored_bytes += restored_bytes
        self.spared_bytes += spared_bytes
        out = self._out
        out.emit(
            events.LeaseResumed(
                lease=lease.id,
                session=lease.session,
                prefix_tokens=lease.prefix_tokens,
                restored_tokens=restored_tokens,
                restored_bytes=restored_bytes,
                spared_bytes=spared_bytes,
                took_s=out.at_s - caller.since_s,
                away_s=out.at_s - lease.retracted_s,
            )
        )
        out.answer(
            caller.session,
            client.Resumed(
                call=caller.call,
                prefix_tokens=lease.prefix_tokens,
                restored_tokens=restored_tokens,
                kv_tokens=kv_tokens,
                pages=lease.page_table,
                beside=self._leases.components.page_tables(lease),
            ),
        )

    def _answer_failed(self, lease: LeaseRecord, refusal: Refusal) -> None:
        caller = self.callers.pop(lease.id, None)
        if caller is not None:
            self._out.answer(caller.session, client.Failed(caller.call, refusal))

    def _refusal(self, code: Code, message: str) -> Refusal:
        return Refusal(code, message, side=self._name)
