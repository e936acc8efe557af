"""What each request of an engine does.

Every request gets one answer, now or when there is room; a refusal names the session's own mistake.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, get_args

from msgspec.structs import replace
from mypy_extensions import mypyc_attr

from kvd.core import effects
from kvd.core.cache.lease_record import LeaseRecord
from kvd.core.cache.namespaces import base_of, keys_meant
from kvd.core.engines.lease_verbs import LeaseVerbs
from kvd.core.engines.pin_verbs import PinVerbs
from kvd.core.engines.receive_verbs import ReceiveVerbs
from kvd.core.engines.send_verbs import SendVerbs
from kvd.core.engines.verbs import Verbs
from kvd.core.inspect.snapshot import snapshot
from kvd.core.inspect.why import locked_words
from kvd.core.leases.epochs import begin_epoch
from kvd.core.leases.kept_answers import EpochAnswer, FlushAnswer
from kvd.core.leases.lease_events import tell_written
from kvd.core.settings import CacheMode
from kvd.errors import Code, Refusal
from kvd.wire import client
from kvd.wire.attach import CopyBegins, CopyEnds, CopyWaits, KeepsBlocks
from kvd.wire.pins import PinPrefix, PrefetchPrompt, UnpinPrefix

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core.inputs import FromClient, FromWorker, WorkerCopies
    from kvd.core.node_parts import NodeParts
    from kvd.types import Tokens
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
class Engines(Verbs):
    """The verbs of the client API."""

    def __init__(self, node: NodeParts) -> None:
        super().__init__(node)
        self._node = node
        self._admission = node.admission
        self._pulls = node.pulls
        self._mode = node.settings.cache_mode
        self._is_radix = self._mode is CacheMode.RADIX
        self._epochs = node.epochs
        self._lease_verbs = leases = LeaseVerbs(node)
        receives, sends, pins = ReceiveVerbs(node), SendVerbs(node), PinVerbs(node)
        # One verb per request type: Any, because each takes its own type of message.
        self._verbs: dict[type, Callable[[int, Any, Tokens], Refusal | None]] = {
            client.OpenLease: leases.open_lease,
            client.HoldPrefix: leases.hold_prefix,
            client.ExtendLease: leases.extend_lease,
            client.SlideLease: leases.slide_lease,
            client.CommitLease: leases.commit_lease,
            client.ReleaseLease: leases.release_lease,
            client.CommitAndRelease: leases.commit_and_release,
            client.CommitUpTo: leases.commit_lease,
            client.CommitAndExtend: leases.commit_and_extend,
            client.ReleaseUpTo: leases.commit_and_release,
            client.SayWritten: leases.say_written,
            client.OpenArena: leases.open_arena,
            client.ReceiveRequest: receives.receive,
            client.CancelReceive: receives.cancel_receive,
            client.SendRequest: sends.send,
            client.Advance: sends.advance,
            client.Finish: sends.finish,
            client.HandOver: sends.hand_over,
            client.FinishAndRelease: sends.finish_and_release,
            client.AbortSend: sends.abort_send,
            client.KeepRoom: sends.keep_room,
            client.MatchPrefix: self._match,
            PinPrefix: pins.pin,
            UnpinPrefix: pins.unpin,
            PrefetchPrompt: self._prefetch,
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
            refusal = self._lease_verbs.take_word(got.session, got.message)
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
        elif isinstance(message, CopyWaits):
            refusal = self._node.engine_copies.marks.begin(got, message)
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
        namespace, tiers = message.namespace, self._node.tiers
        report = self._dropped(message.call, namespace, tiers.flush)
        self._node.kept_answers.answer(
            FlushAnswer(namespace, self._out.at_s, report=report, session=session)
        )
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
            self._node.pins.epoch_over(base)
            # Of no use to anybody from now on; what is locked goes when it is the oldest.
            report = self._dropped(message.call, base, self._node.tiers.end_epochs)
        self._node.kept_answers.answer(
            EpochAnswer(base, self._out.at_s, report=report, session=session)
        )
        return None

    def _dropped(
        self, call: int, namespace: str, drop: Callable[[tuple[str, ...], str], tuple[int, int]]
    ) -> client.FlushReport:
        """What nobody locks of a namespace is dropped; what stays, and for whom."""
        keys = keys_meant(namespace, self._leases.tree.roots)
        kept = locked_words(self._node, keys)
        freed_pages, kept_pages = drop(keys, namespace)
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

    def _cancel_call(self, session: int, message: client.CancelCall, _: Tokens) -> Refusal | None:
        """Take a request out of the queue; one that was admitted meanwhile is not touched."""
        refusal = Refusal(Code.CANCELLED, "the engine no longer waits for it", side=self._name)
        self._admission.cancel(session, message.of, refusal)
        self._prefiller.cancel_call(session, message.of, refusal)
        self._pulls.cancel_call(session, message.of, refusal)
        self._out.answer(session, client.Done(message.call))
        return None

    # ---- routers -----------------------------------------------------------------------------

    def _prefetch(self, session: int, message: PrefetchPrompt, tokens: Tokens) -> Refusal | None:
        self._node.tiers.promotions.prefetch(session, message.call, tokens, message.namespace)
        return self._match(session, message, tokens)

    def _match(
        self, session: int, message: client.MatchPrefix | PrefetchPrompt, tokens: Tokens
    ) -> Refusal | None:
        load = (
            len(self._decoder.open.parts)
            + len(self._prefiller.rooms.by_room)
            + len(self._admission)
        )
        # A question must not count as a use: a router that asks every node would keep everything
        # young.
        cached_tokens = self._leases.tree.probe(tokens, message.namespace)
        tier_tokens, tier_ms = self._node.tiers.promotions.told(
            tokens, message.namespace, cached_tokens
        )
        self._out.answer(
            session,
            client.MatchReply(
                call=message.call,
                tokens=cached_tokens,
                load=load,
                free=self._leases.headroom_pages,
                tier_tokens=tier_tokens,
                tier_ms=tier_ms,
            ),
        )
        return None

    def _snapshot(self, session: int, message: client.GetSnapshot, _: Tokens) -> Refusal | None:
        self._out.answer(session, client.Snapshotted(message.call, snapshot(self._node)))
        return None
