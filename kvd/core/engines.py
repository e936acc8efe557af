"""What each request of an engine does.

Every request gets one answer, now or when there is room; a refusal names the session's own mistake.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, get_args

from msgspec.structs import replace
from mypy_extensions import mypyc_attr

from kvd.core import effects
from kvd.core.cache.lease import ENGINE, Claim, Shortage
from kvd.core.cache.lease_record import LeaseRecord
from kvd.core.cache.namespaces import base_of, keys_meant
from kvd.core.handoff.offer import prompt_digest
from kvd.core.handoff.parts import SendingEngine, SendPart
from kvd.core.handoff.posts import no_event
from kvd.core.handoff.pull import NO_ROOM
from kvd.core.handoff.refusals import asked_again, other_tokens, rank_gone
from kvd.core.handoff.retries import ReceiveRetries, SendRetries, received_request, sends_prompt_of
from kvd.core.inspect.snapshot import snapshot
from kvd.core.inspect.why import locked_words
from kvd.core.leases.admission import MemoryAsker, Waiter
from kvd.core.leases.arenas import REASON, bad_pages, in_use, no_run, unfit_pool
from kvd.core.leases.epochs import EpochAnswer, begin_epoch
from kvd.core.leases.lease_events import tell_written
from kvd.core.leases.receive_tier import bad_tier
from kvd.core.leases.written import (
    say_advanced,
    say_written,
    tokens_of_ranks,
    why_unwritten,
)
from kvd.core.settings import CacheMode
from kvd.errors import Code, Refusal
from kvd.types import MAX_ROOM, NO_TOKENS, Pages, Tokens, count, slice_pages
from kvd.wire import client
from kvd.wire.attach import CopyBegins, CopyEnds, KeepsBlocks
from kvd.wire.bounds import MAX_SOURCES

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core.handoff.parts import ReceiveAttempt
    from kvd.core.inputs import FromClient, FromWorker, WorkerCopies
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.node_parts import NodeParts
    from kvd.core.outbox import Outbox
    from kvd.wire.attach import ProcessWord


NAMING: Final = frozenset(get_args(client.ABOUT_PROMPTS))
"""Requests that name a namespace."""

COUNTS: Final = (
    client.OpenLease,
    client.ExtendLease,
    client.ReleaseLease,
    client.GetSnapshot,
    client.CancelCall,
    client.ForgetPrompts,
)
"""Requests that need no KV: only these are served where there is none."""


MAX_KEPT: Final = 16
"""Locked nodes of which a flush tells; the figures count all."""


@mypyc_attr(allow_interpreted_subclasses=True)
class LeaseAsker(MemoryAsker):
    """An engine that asked for a plain lease: it waits for memory and nothing else."""

    __slots__ = ("_call", "_leases", "_out", "_session")

    def __init__(self, session: int, call: int, leases: LeaseTable, out: Outbox) -> None:
        self._leases = leases
        self._session = session
        self._call = call
        self._out = out

    def admitted(self, lease: LeaseRecord) -> None:
        """Answer with the lease."""
        self._out.answer(self._session, _leased(self._call, lease, self._leases))

    def refused(self, refusal: Refusal) -> None:
        """Answer with the reason."""
        self._out.answer(self._session, client.Failed(self._call, refusal))


@mypyc_attr(allow_interpreted_subclasses=True)
class Engines:
    """The verbs of the client API."""

    def __init__(self, node: NodeParts) -> None:
        self._node = node
        self._leases = node.leases
        self._owners = node.owners
        self._admission = node.admission
        self._sessions = node.sessions
        self._decoder = node.decoder
        self._receives = node.receives
        self._pulls = node.pulls
        self._prefiller = node.prefiller
        self._sends = node.sends
        self._receive_retries = ReceiveRetries(node.settings, node.decoder)
        self._send_retries = SendRetries(
            node.settings, node.leases, node.prefiller, node.kept_rooms, node.out
        )
        self._drainer = node.drainer
        self._out = node.out
        self._name = node.settings.name
        self._mode = node.settings.cache_mode
        self._is_radix = self._mode is CacheMode.RADIX
        self._epochs = node.epochs
        # One verb per request type: Any, because each takes its own type of message.
        self._verbs: dict[type, Callable[[int, Any, Tokens], Refusal | None]] = {
            client.OpenLease: self._open_lease,
            client.HoldPrefix: self._hold_prefix,
            client.ExtendLease: self._extend_lease,
            client.SlideLease: self._slide_lease,
            client.CommitLease: self._commit_lease,
            client.ReleaseLease: self._release_lease,
            client.CommitAndRelease: self._commit_and_release,
            client.CommitUpTo: self._commit_lease,
            client.CommitAndExtend: self._commit_and_extend,
            client.ReleaseUpTo: self._commit_and_release,
            client.SayWritten: self._say_written,
            client.ReceiveRequest: self._receive,
            client.CancelReceive: self._cancel_receive,
            client.SendRequest: self._send,
            client.Advance: self._advance,
            client.Finish: self._finish,
            client.HandOver: self._hand_over,
            client.KeepRoom: self._keep_room,
            client.OpenArena: self._open_arena,
            client.FinishAndRelease: self._finish_and_release,
            client.AbortSend: self._abort_send,
            client.MatchPrefix: self._match,
            client.AboutPrompt: self._about_prompt,
            client.ForgetPrompts: self._forget_prompts,
            client.FlushNamespace: self._flush_namespace,
            client.BeginEpoch: self._begin_epoch,
            client.GetSnapshot: self._snapshot,
            client.CancelCall: self._cancel_call,
            client.RetractLease: node.fetcher.retract,
            client.ResumeLease: node.retractor.resume,
            client.FetchPages: node.fetcher.fetch,
        }

    def request(self, got: FromClient) -> None:
        """One request of an engine: one answer, now or when there is room."""
        # Any, and by type: to ask for an instance of a union of six takes three times as long.
        message: Any = got.message
        kind = type(message)
        # A name that is known to be its own key is that of nearly all requests.
        if kind in NAMING and message.namespace not in self._epochs.plain:
            named = self._in_epoch(message)
            if isinstance(named, Refusal):
                self._out.answer(got.session, client.Failed(message.call, named))
                return
            message = named
        verb = self._verbs.get(kind)
        session = self._sessions.by_id.get(got.session)
        # Before what is asked: one that was hung up on hears why, whatever it wants.
        if session is None or session.hang_up is not None:
            refusal = self._owners.sessions.refusal(got.session)
        elif verb is None:
            refusal = self._wrong(f"this node's core serves no {type(message).__name__}")
        elif self._is_radix:
            refusal = verb(got.session, message, got.tokens)
        else:
            let = self._allowed(message)
            refusal = let if isinstance(let, Refusal) else verb(got.session, let, got.tokens)
        if refusal is not None:
            self._out.answer(got.session, client.Failed(message.call, refusal))

    def worker_said(self, got: FromWorker) -> None:
        """A process of a session says how far it has written: it is answered, and nobody else."""
        refusal = self._unserved(got.session, got.message)
        if refusal is None:
            refusal = self._take_word(got.session, got.message)
        self._out.effects.append(effects.AnswerWorker(got.worker, got.message.call, refusal))

    def worker_copies(self, got: WorkerCopies) -> None:
        """A process is about to copy pages, or has done so: no byte moves before the answer."""
        message = got.message
        refusal = self._unserved(got.session, message)
        if refusal is not None:
            pass
        elif isinstance(message, KeepsBlocks):
            sessions = self._owners.sessions
            sessions.keeps_blocks(sessions.by_id[got.session])
        elif isinstance(message, CopyBegins):
            refusal = self._node.engine_copies.begin(got, message)
            if refusal is None and message.to_pages:
                # What it saves is its word for that rank.
                self._sessions.by_id[got.session].dead_ranks.pop(got.rank, None)
        else:
            refusal = self._copy_ended(got, message)
        self._out.effects.append(effects.AnswerWorker(got.worker, message.call, refusal))

    def _unserved(self, session: int, message: client.Request | ProcessWord) -> Refusal | None:
        """Why nothing that a process of that session says is taken."""
        refusal = self._owners.sessions.refusal(session)
        if refusal is None and self._mode is CacheMode.PREFILL_ONLY:
            refusal = self._no_kv(message)
        return refusal

    def _copy_ended(self, got: WorkerCopies, message: CopyEnds) -> Refusal | None:
        """Sends of a prompt go on by what of it has been saved."""
        saved = self._node.engine_copies.end(got, message)
        if isinstance(saved, LeaseRecord):
            tell_written(self._out, saved)
            self._sends.lease_written(saved)
        self._admission.wake()
        return saved if isinstance(saved, Refusal) else None

    def _allowed(self, request: client.Request) -> client.Request | Refusal:
        """The request as ``cache.mode`` has it, or why it is not served; before any verb sees it.

        ``off`` takes away the tree: nothing is inserted, so nothing is ever matched.
        ``prefill-only`` takes away the bytes too: leases count tokens, and whatever would write,
        insert, match, send, receive, check or copy KV is refused rather than done with nothing.
        """
        if isinstance(request, client.AboutPrompt):
            let = self._allowed(request.request)
            return let if isinstance(let, Refusal) else replace(request, request=let)
        if self._mode is CacheMode.OFF:
            if isinstance(request, client.OpenLease | client.ReceiveRequest | client.HoldPrefix):
                return replace(request, cache=False)
            return request
        if isinstance(request, COUNTS):
            return request
        return self._no_kv(request)

    def _no_kv(self, request: client.Request | ProcessWord) -> Refusal:
        """What is said to whoever wants more than counts of a pool without bytes."""
        verb = type(request).__struct_config__.tag
        return Refusal(
            Code.NOT_SUPPORTED,
            f"{verb} needs KV, and pool {self._node.settings.spec.name} of {self._name} has none: "
            'cache.mode is "prefill-only" there, which counts tokens and takes no byte; set '
            'cache.mode = "radix"',
            side=self._name,
        )

    # ---- namespaces --------------------------------------------------------------------------

    def _in_epoch(self, message: client.ABOUT_PROMPTS) -> client.ABOUT_PROMPTS | Refusal:
        """The request in the epoch of its namespace."""
        key = self._epochs.internal(message.namespace)
        if isinstance(key, Refusal):
            return key
        return message if key == message.namespace else replace(message, namespace=key)

    def _flush_namespace(
        self, session: int, message: client.FlushNamespace, _: Tokens
    ) -> Refusal | None:
        key = self._epochs.internal(message.namespace)
        if isinstance(key, Refusal):
            return key
        self._out.answer(session, self._flush(message.call, message.namespace))
        return None

    def _begin_epoch(self, session: int, message: client.BeginEpoch, _: Tokens) -> Refusal | None:
        """Its base is in that epoch from now on; the answer comes when it is on disk."""
        epochs, namespace = self._epochs, message.namespace
        refusal = epochs.flaw(namespace, message.epoch)
        if refusal is not None:
            return refusal
        base, epoch = base_of(namespace), epochs.after(namespace, message.epoch)
        if epoch == epochs.now(namespace):
            # Each engine of the node says it after the same update: the first has done it.
            report = client.FlushReport(message.call, 0, 0, epoch=epoch)
        else:
            who = self._sessions.by_id[session].name
            sends, out = self._prefiller, self._out
            begin_epoch(epochs, sends, out, base=base, epoch=epoch, who=who)
            # Of no use to anybody from now on; what is locked goes when it is the oldest.
            report = self._flush(message.call, base)
        self._node.epoch_answers.answer(
            EpochAnswer(base, self._out.at_s, report=report, session=session)
        )
        return None

    def _flush(self, call: int, namespace: str) -> client.FlushReport:
        keys = keys_meant(namespace, self._leases.tree.roots)
        kept = locked_words(self._node, keys)
        freed_pages, kept_pages = self._leases.flush(keys, namespace)
        return client.FlushReport(
            call=call,
            freed_pages=freed_pages,
            kept_pages=kept_pages,
            kept=kept[:MAX_KEPT],
            epoch=self._epochs.now(namespace),
        )

    # ---- prompts -----------------------------------------------------------------------------

    def _about_prompt(
        self, session: int, message: client.AboutPrompt, more: Tokens
    ) -> Refusal | None:
        """What was asked, of the prompt with that number."""
        call = message.request.call
        if call != message.call:
            return self._wrong(f"call {message.call} about a prompt has call {call} within")
        request = self._in_epoch(message.request)
        if isinstance(request, Refusal):
            return request
        most = self._node.settings.max_prompt_tokens
        prompts = self._sessions.by_id[session].prompts
        tokens = prompts.told(message.prompt, message.known_tokens, more, most=most)
        if isinstance(tokens, Refusal):
            return tokens
        return self._verbs[type(request)](session, request, tokens)

    def _forget_prompts(
        self, session: int, message: client.ForgetPrompts, _: Tokens
    ) -> Refusal | None:
        prompts = self._sessions.by_id[session].prompts
        for number in message.prompts:
            prompts.forget(number)
        self._out.answer(session, client.Done(message.call))
        return None

    # ---- leases ------------------------------------------------------------------------------

    def _open_lease(
        self, session: int, message: client.OpenLease, tokens: Tokens
    ) -> Refusal | None:
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
        lease = self._admission.at_once(claim)
        if isinstance(lease, LeaseRecord):
            self._out.answer(session, _leased(message.call, lease, self._leases))
            return None
        asker = LeaseAsker(session, message.call, self._leases, self._out)
        wait_s = min(self._node.settings.max_deadline_s, message.deadline_s)
        self._admission.submit(Waiter(claim, self._out.at_s + wait_s, asker), lease)
        return None

    def _hold_prefix(
        self, session: int, message: client.HoldPrefix, tokens: Tokens
    ) -> Refusal | None:
        if self._drainer.drain is not None:
            return self._drainer.refusal()
        opening = client.OpenLease(
            call=message.call,
            namespace=message.namespace,
            priority=message.priority,
            cache=message.cache,
        )
        # Not through the queue: who waits there waits for pages, and this takes none of them.
        lease = self._leases.open_prefix(_plain_claim(session, opening, tokens))
        if not isinstance(lease, LeaseRecord):
            return self._no_room("a cached prefix", lease)
        self._out.answer(session, _leased(message.call, lease, self._leases))
        return None

    def _open_arena(self, session: int, message: client.OpenArena, _: Tokens) -> Refusal | None:
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
        arena = self._leases.open_arena(claim, message.n_pages)
        if arena is None:
            return no_run(self._leases, message.n_pages, self._name)
        self._out.answer(session, _leased(message.call, arena, self._leases))
        return None

    def _extend_lease(self, session: int, message: client.ExtendLease, _: Tokens) -> Refusal | None:
        lease = self._owners.running_lease_of(session, message.lease)
        if isinstance(lease, Refusal):
            return lease
        if message.n_tokens < 0:
            return self._wrong(f"extend by {message.n_tokens} tokens")
        # Before it grows: the answer has the new pages only.
        first = count(lease.page_table)
        leases = self._leases
        shortage = leases.extend(lease, message.n_tokens)
        if shortage is not None:
            return self._no_room(f"lease {lease.id}", shortage)
        self._answer_page_table(session, message.call, lease, first)
        return None

    def _slide_lease(self, session: int, message: client.SlideLease, _: Tokens) -> Refusal | None:
        lease = self._owners.running_lease_of(session, message.lease)
        if isinstance(lease, Refusal):
            return lease
        if not 0 <= message.upto_tokens <= lease.room_tokens:
            return self._wrong(
                f"slide of lease {lease.id} to token {message.upto_tokens}, it has room for "
                f"{lease.room_tokens}"
            )
        refusal = self._leases.slide(lease, message.upto_tokens)
        if refusal is None:
            # From the end of the row on: a slide moves nothing of the first component.
            self._answer_page_table(session, message.call, lease, count(lease.page_table))
        return refusal

    def _commit_lease(
        self, session: int, message: client.CommitLease | client.CommitUpTo, tokens: Tokens
    ) -> Refusal | None:
        lease = self._owners.running_lease_of(session, message.lease)
        if isinstance(lease, Refusal):
            return lease
        if type(message) is client.CommitUpTo:
            first = self._leases.commit(lease, tokens, message.upto_tokens, swaps=message.swaps)
        else:
            first = self._leases.commit(lease, tokens)
        if isinstance(first, Refusal):
            return first
        self._answer_page_table(session, message.call, lease, first)
        return None

    def _commit_and_extend(
        self, session: int, message: client.CommitAndExtend, tokens: Tokens
    ) -> Refusal | None:
        lease = self._owners.running_lease_of(session, message.lease)
        if isinstance(lease, Refusal):
            return lease
        if message.extend_tokens < 0:
            return self._wrong(f"extend by {message.extend_tokens} tokens")
        first = self._leases.commit_and_extend(
            lease, tokens, message.extend_tokens, message.upto_tokens, swaps=message.swaps
        )
        if isinstance(first, Refusal):
            return first
        if isinstance(first, Shortage):
            return self._no_room(f"lease {lease.id}", first)
        self._answer_page_table(session, message.call, lease, first)
        return None

    def _say_written(self, session: int, message: client.SayWritten, _: Tokens) -> Refusal | None:
        refusal = self._take_word(session, message)
        if refusal is None:
            self._out.answer(session, client.Done(message.call))
        return refusal

    def _take_word(self, session: int, message: client.SayWritten) -> Refusal | None:
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

    def _release_lease(
        self, session: int, message: client.ReleaseLease, _: Tokens
    ) -> Refusal | None:
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

    def _commit_and_release(
        self, session: int, message: client.CommitAndRelease | client.ReleaseUpTo, tokens: Tokens
    ) -> Refusal | None:
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
        elif not self._sessions.is_asked_about(lease) and self._leases.commit_and_release(
            lease, tokens
        ):
            if self._decoder.ready:
                self._decoder.lease_ended(lease.id)
            self._out.answer(session, client.Done(message.call))
            return None
        first = self._leases.commit(lease, tokens, upto_tokens)
        if isinstance(first, Refusal):
            return first
        lease.is_whole = self._is_whole(lease)
        self._release(session, message.call, lease)
        return None

    def _is_whole(self, lease: LeaseRecord) -> bool:
        """Whether a state of it is of the tokens that are committed.

        It stands for all that was computed: so no more may be known, and none be unwritten.
        """
        n_tokens = count(lease.tokens)
        return lease.written_tokens == n_tokens and self._node.engine_copies.states_stand_for(
            lease, n_tokens
        )

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

    def _cancel_call(self, session: int, message: client.CancelCall, _: Tokens) -> Refusal | None:
        """Take a request out of the queue; one that was admitted meanwhile is not touched."""
        refusal = Refusal(Code.CANCELLED, "the engine no longer waits for it", side=self._name)
        self._admission.cancel(session, message.of, refusal)
        self._prefiller.cancel_call(session, message.of, refusal)
        self._pulls.cancel_call(session, message.of, refusal)
        self._out.answer(session, client.Done(message.call))
        return None

    # ---- decode side -------------------------------------------------------------------------

    def _receive(
        self, session: int, message: client.ReceiveRequest, tokens: Tokens
    ) -> Refusal | None:
        if message.room == NO_ROOM:
            return self._pull(session, message, tokens)
        refusal = self._bad_room(message.room)
        if refusal is not None:
            return refusal
        request = before = None
        if message.request_id:
            request = received_request(message, tokens)
            before = self._receive_retries.asked_before(session, message.room, request)
        if isinstance(before, Refusal):
            return before
        if before is not None and before.waiter is None:
            return self._receive_again(session, message, before)
        refusal = self._drainer.refusal() or self._bad_receive(message, tokens)
        if refusal is None and (message.arena or message.pages):
            refusal = self._not_into_arena(session, message, tokens, before)
        if refusal is None:
            self._receives.receive(session, message, tokens, request=request)
            # Behind the new one, so that no source hears that nobody wants the room.
            if before is not None:
                self._decoder.cancel_attempt(before, asked_again(message, self._name))
            return None
        # The writers are told too: an engine may have opened a send for this room already.
        for source in message.source[:MAX_SOURCES]:
            self._receives.withdraw_room(
                message.room, self._node.peers.find(source) or source, refusal
            )
        return refusal

    def _receive_again(
        self, session: int, message: client.ReceiveRequest, before: ReceiveAttempt
    ) -> Refusal | None:
        """It is answered as the first."""
        promised = 0 if before.lease is None else before.lease.promised_tokens
        if message.promise_tokens > promised:
            # Not answered with less: its engine would cancel that, and the first call's with it.
            return self._wrong(
                f"request {message.request_id} was promised {promised} tokens by its first call, "
                f"this one asks for {message.promise_tokens}"
            )
        answer = client.Receiving(
            message.call, before.id, before.prefix_tokens, promised_tokens=promised
        )
        self._out.answer(session, answer)
        return None

    def _not_into_arena(
        self,
        session: int,
        message: client.ReceiveRequest,
        tokens: Tokens,
        before: ReceiveAttempt | None,
    ) -> Refusal | None:
        """Why the pages that the engine has named cannot be written."""
        arena = self._owners.arena_of(session, message.arena)
        if isinstance(arena, Refusal):
            return arena
        size, have, n_tokens = self._leases.page_size, message.have_tokens, count(tokens)
        if have % size or not 0 <= have <= n_tokens:
            return self._wrong(
                f"have_tokens={have} of a prompt of {n_tokens}: whole pages of {size} tokens, and "
                "no more than the prompt"
            )
        beyond = message.reserve_tokens or message.promise_tokens
        if beyond or message.tier or len(message.source) != 1:
            what = "a receive into an arena has one source, no reserve, no promise and no tier"
            return self._wrong(what)
        pages = Pages(message.pages)
        n_pages = self._leases.pages_for(n_tokens) - have // size
        waiting = [
            receive
            for receive in self._receives.lent(arena.id)
            if receive.waiter and receive is not before
        ]
        queued = [
            (f"receive {receive.id}", receive.waiter.claim.pages)
            for receive in waiting
            if receive.waiter
        ]
        return bad_pages(arena, pages, n_pages, self._leases) or in_use(
            arena.id, pages, [*queued, *self._sends.reads_of(arena)]
        )

    def _pull(self, session: int, message: client.ReceiveRequest, tokens: Tokens) -> Refusal | None:
        """What one source has cached of the prompt; nobody else takes part."""
        refusal = self._drainer.refusal() or self._bad_receive(message, tokens)
        if refusal is None and (message.arena or message.pages):
            return self._wrong("a pull lands in pages that kvd places: receive it in a room")
        if refusal is None and len(message.source) != 1:
            refusal = self._wrong(
                f"a receive without a room from {', '.join(message.source)}: one source is asked "
                "what it has"
            )
        return refusal or self._pulls.pull(session, message, tokens)

    def _bad_receive(self, message: client.ReceiveRequest, tokens: Tokens) -> Refusal | None:
        least = min(message.reserve_tokens, message.promise_tokens, message.step_tokens)
        if not tokens or least < 0:
            return self._wrong(
                f"receive of {count(tokens)} tokens, {message.reserve_tokens} in reserve and "
                f"{message.promise_tokens} promised, {message.step_tokens} at a time"
            )
        n_tokens = count(tokens)
        refusal = bad_tier(message.tier, n_tokens, self._node.settings.spec, self._name)
        return refusal or self._decoder.offers.unfit_sources(message.source, n_tokens)

    def _cancel_receive(
        self, session: int, message: client.CancelReceive, _: Tokens
    ) -> Refusal | None:
        attempt = self._decoder.attempts.get(message.receive)
        if attempt is None or attempt.session != session:
            return self._unknown_handoff("receive", message.receive)
        # Answered first: what the cancel answers after it belongs to the receive, not to this call.
        self._out.answer(session, client.Done(message.call))
        self._decoder.cancel_attempt(
            attempt, Refusal(Code.CANCELLED, "the decode engine cancelled it", side=self._name)
        )
        return None

    # ---- prefill side ------------------------------------------------------------------------

    def _send(self, session: int, message: client.SendRequest, tokens: Tokens) -> Refusal | None:
        # Before its lease is looked at, which the first of them may have ended.
        if message.request_id:
            before = self._send_retries.asked_before(session, message, tokens)
            if isinstance(before, Refusal):
                return before
            if before is not None:
                self._send_retries.answer_again(before, message)
                return None
        engine = self._sending_engine(session, message, tokens)
        if isinstance(engine, Refusal):
            return engine
        refusal = self._never_written(session, message.room, engine)
        return refusal or self._sends.open_send(message, engine)

    def _never_written(self, session: int, room: int, engine: SendingEngine) -> Refusal | None:
        """Why a send would wait in vain: for the word of a rank that is gone."""
        lease = engine.lease
        for rank, dead in self._sessions.by_id[session].dead_ranks.items():
            # What was leased later may be written by a new process of that rank.
            is_its_own = lease.since_s < dead.at_s and len(lease.said) == dead.ranks
            if not is_its_own or dead.ranks == 1:
                continue
            upto = tokens_of_ranks(lease)[rank]
            if upto < engine.prompt_tokens:
                what = f"a send in room {room}"
                refusal = rank_gone(dead.why, rank, upto, engine.prompt_tokens, what)
                return replace(refusal, side=self._name)
        return None

    def _hand_over(self, session: int, message: client.HandOver, tokens: Tokens) -> Refusal | None:
        if message.after and message.ends_lease:
            return self._wrong("a lease that ends before the event of its last tokens has come")
        if message.request_id:
            before = self._send_retries.asked_before(session, message, tokens)
            if isinstance(before, Refusal):
                return before
            if before is not None:
                return self._hand_over_again(session, message, before)
        engine = self._sending_engine(session, message, tokens)
        if isinstance(engine, Refusal):
            return engine
        refusal = why_unwritten(engine.lease, engine.prompt_tokens)
        refusal = refusal or self._sends.hand_over(message, engine)
        if refusal is None:
            _say_of_lease(engine.lease, engine.prompt_tokens, message.after)
            if message.ends_lease:
                self._end_sent(engine.lease)
        return refusal

    def _hand_over_again(
        self, session: int, message: client.HandOver, before: SendPart
    ) -> Refusal | None:
        """It is answered as the first; the lease that it brings is ended as it says."""
        lease = None
        # The first call may have ended it already: a call that is repeated word for word.
        own = self._leases.leases.get(message.lease)
        if message.ends_lease and own is not None and ENGINE in own.holders:
            found = self._owners.running_lease_of(session, message.lease)
            # What cannot be ended is not answered either: its engine would take it for ended.
            if isinstance(found, Refusal):
                return found
            if found.is_arena:
                return self._wrong("a send of an arena does not end the arena")
            lease = found
        n_tokens = before.request.n_tokens if before.request is not None else before.prompt_tokens
        self._send_retries.answer_again(before, message)
        if lease is not None:
            if why_unwritten(lease, n_tokens) is None:
                _say_of_lease(lease, n_tokens, b"")
            self._end_sent(lease)
        return None

    def _sending_engine(
        self, session: int, message: client.SendRequest | client.HandOver, tokens: Tokens
    ) -> SendingEngine | Refusal:
        """Who sends, of which lease; the caller opens the room."""
        refusal = self._bad_room(message.room) or self._drainer.refusal()
        if refusal is not None:
            return refusal
        if message.pages:
            return self._sending_from_arena(session, message, tokens)
        lease = self._owners.running_lease_of(session, message.lease)
        if isinstance(lease, Refusal):
            return lease
        tokens = tokens or lease.tokens
        if not sends_prompt_of(lease, tokens, message.namespace):
            return other_tokens(lease, tokens, message.namespace, self._name)
        digest = prompt_digest(tokens, message.namespace)
        return SendingEngine(session=session, lease=lease, tokens=tokens, digest=digest)

    def _sending_from_arena(
        self, session: int, message: client.SendRequest | client.HandOver, tokens: Tokens
    ) -> SendingEngine | Refusal:
        """The same of pages that the engine has named; it alone knows what is in them."""
        arena = self._owners.arena_of(session, message.lease)
        if isinstance(arena, Refusal):
            return arena
        if not tokens or (type(message) is client.HandOver and message.ends_lease):
            return self._wrong("a send of an arena names its tokens, and does not end the arena")
        pages = Pages(message.pages)
        refusal = bad_pages(arena, pages, self._leases.pages_for(count(tokens)), self._leases)
        if refusal is not None:
            return refusal
        key = message.namespace
        digest = prompt_digest(tokens, key)
        return SendingEngine(session, arena, tokens, digest, pages, namespace=key)

    def _advance(self, session: int, message: client.Advance, _: Tokens) -> Refusal | None:
        part = self._part(session, message.send)
        if isinstance(part, Refusal):
            return part
        refusal = _unwritten(part, message.upto_tokens)
        refusal = refusal or self._sends.advance_send(part, message.upto_tokens, message.after)
        if refusal is None:
            # Only if the send took it: a refused number must not be a word about the lease.
            _say_of_lease(_lease_of(part), message.upto_tokens, message.after)
            self._out.answer(session, client.Done(message.call))
        return refusal

    def _finish(self, session: int, message: client.Finish, _: Tokens) -> Refusal | None:
        part = self._part(session, message.send)
        if isinstance(part, Refusal):
            # It hears now that it failed, and nobody else will ask for it.
            failed = self._prefiller.forget_failed(session, message.send)
            # The handoff failed, and the prompt was computed all the same: it stays cached here.
            if failed is not None:
                lease = self._leases.leases.get(failed.lease)
                if lease is not None and why_unwritten(lease, failed.prompt_tokens) is None:
                    _say_of_lease(lease, failed.prompt_tokens, message.after)
            return part
        lease = _lease_of(part)  # a part that settles at once lets go of it
        refusal = _unwritten(part, part.prompt_tokens)
        refusal = refusal or self._sends.finish_send(part, message.call, message.aux, message.after)
        if refusal is None:
            _say_of_lease(lease, part.prompt_tokens, message.after)
        return refusal

    def _finish_and_release(
        self, session: int, message: client.FinishAndRelease, _: Tokens
    ) -> Refusal | None:
        part = self._part(session, message.send)
        failed = self._prefiller.failed.get(message.send)
        if isinstance(part, Refusal):
            if failed is None or failed.session != session:
                return part
            number, prompt_tokens = failed.lease, failed.prompt_tokens
        else:
            assert part.engine is not None  # by_send has those with an engine
            number, prompt_tokens = part.engine.lease.id, part.prompt_tokens
        # First, because what cannot be released is not finished either.
        lease = self._owners.running_lease_of(session, number)
        if isinstance(lease, Refusal):
            return lease
        refusal = why_unwritten(lease, prompt_tokens)
        if refusal is not None:
            return refusal
        if isinstance(part, Refusal):
            self._prefiller.forget_failed(session, message.send)
            self._out.answer(session, _unsent(message.call, part))
        else:
            refusal = self._sends.finish_send(part, message.call, message.aux)
            if refusal is not None:
                return refusal
        _say_of_lease(lease, prompt_tokens, b"")
        self._end_sent(lease)
        return None

    def _end_sent(self, lease: LeaseRecord) -> None:
        """Its engine has said that the prompt is written, and lets go: what was said is kept."""
        # No commit, which counts also what a longer send of it still awaits an event for.
        lease.is_whole = self._is_whole(lease)
        self._sessions.end_lease(lease, "normal")

    def _keep_room(self, session: int, message: client.KeepRoom, _: Tokens) -> Refusal | None:
        return self._node.kept_rooms.keep_room(session, message)

    def _abort_send(self, session: int, message: client.AbortSend, _: Tokens) -> Refusal | None:
        part = self._part(session, message.send)
        if isinstance(part, Refusal):
            if self._prefiller.forget_failed(session, message.send) is None:
                return part
            self._out.answer(session, client.Done(message.call))
            return None
        # Answered first, as a cancel is.
        self._out.answer(session, client.Done(message.call))
        self._prefiller.abandon_send(
            part,
            Refusal(Code.ABORTED, f"the prefill engine gave up: {message.reason}", self._name),
        )
        return None

    def _part(self, session: int, send: int) -> SendPart | Refusal:
        part = self._prefiller.by_send.get(send)
        if part is not None and part.session == session:
            return part
        failed = self._prefiller.failed.get(send)
        if failed is not None and failed.session == session:
            return failed.refusal
        return self._unknown_handoff("send", send)

    # ---- routers -----------------------------------------------------------------------------

    def _match(self, session: int, message: client.MatchPrefix, tokens: Tokens) -> Refusal | None:
        load = len(self._decoder.parts) + len(self._prefiller.rooms.by_room) + len(self._admission)
        self._out.answer(
            session,
            client.MatchReply(
                call=message.call,
                # A question must not count as a use: a router that asks every node would keep
                # everything young.
                tokens=self._leases.tree.probe(tokens, message.namespace),
                load=load,
                free=self._leases.headroom_pages,
            ),
        )
        return None

    def _snapshot(self, session: int, message: client.GetSnapshot, _: Tokens) -> Refusal | None:
        self._out.answer(session, client.Snapshotted(message.call, snapshot(self._node)))
        return None

    # ---- refusals ----------------------------------------------------------------------------

    def _bad_room(self, room: int) -> Refusal | None:
        if 1 <= room <= MAX_ROOM:
            return None
        return Refusal(
            Code.BAD_ROOM,
            f"room {room} is not in 1..{MAX_ROOM} (0 means no room to every router)",
            side=self._name,
            numbers={"room": str(room)},
        )

    def _wrong(self, what: str) -> Refusal:
        return Refusal(Code.BAD_REQUEST, what, side=self._name)

    def _unknown_handoff(self, kind: str, part_id: int) -> Refusal:
        return Refusal(
            Code.UNKNOWN_HANDOFF,
            f"this session has no open {kind} {part_id}: it ended, or never was its own",
            side=self._name,
            numbers={kind: part_id},
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


def _leased(call: int, lease: LeaseRecord, leases: LeaseTable) -> client.Leased:
    """The answer that names the lease and its pages."""
    components = leases.components
    beside = components.page_tables(lease) if components.each else ()
    promised = 0 if lease.promise is None else lease.promised_tokens
    # By position, as above.
    return client.Leased(call, lease.id, lease.prefix_tokens, lease.page_table, beside, promised)


def _lease_of(part: SendPart) -> LeaseRecord | None:
    return part.engine.lease if part.engine is not None else None


def _unwritten(part: SendPart, upto_tokens: int) -> Refusal | None:
    """Why a send may not be told that so much of its prompt is written."""
    lease = _lease_of(part)
    return None if lease is None else why_unwritten(lease, upto_tokens)


def _say_of_lease(lease: LeaseRecord | None, upto_tokens: int, after: bytes) -> None:
    """What a send is told of its prompt holds for its lease."""
    if lease is not None:
        say_advanced(lease, upto_tokens, after)


def _unsent(call: int, refusal: Refusal) -> client.Finished:
    """The answer to the end of a send that had failed before."""
    return client.Finished(
        call=call, failure=refusal, decode_prefix_len=0, sent_pages=0, sent_bytes=0
    )
