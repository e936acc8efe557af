"""The asynchronous client: what an engine holds in its hands.

    async with kvd.client.connect(name="decode-0") as node:
        lease = await node.lease(tokens)
        ...
        await lease.release()

Every call ends in a reply or a ``KvdError``; a cancelled call leaves nothing behind. The blocking
client runs these very verbs, see ``port``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from kvd.client.answers import FlushResult, Matched, PinnedPrefix
from kvd.client.arena import PageArena
from kvd.client.arguments import names, opaque, seconds, whole, wholes
from kvd.client.attachment import ATTACH_WITHIN_S
from kvd.client.connection import Connection
from kvd.client.device_event import handle_of
from kvd.client.endpoint import client_endpoint
from kvd.client.handoff import Receive, Send, keep_room, outcome, room_number, sending
from kvd.client.lease import Lease, lease_number
from kvd.client.lease_key import is_ours, why_foreign, why_stale
from kvd.client.loop import LoopChannel, attach
from kvd.client.mover.pending_copy import MARK_WITHIN_S
from kvd.client.pool import Pool, Pools
from kvd.client.port import Port, confused, within
from kvd.client.prompt import Prompt, PromptAddress, address_of, perform_about
from kvd.client.returning import RETURN_WITHIN_S
from kvd.client.worker import join
from kvd.errors import Code, KvdError, Refusal
from kvd.wire import client as wire
from kvd.wire.attach import Attach
from kvd.wire.pins import PinPrefix, PrefetchPrompt, PrefixPinned, UnpinPrefix

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Mapping, Sequence

    from kvd.client.attachment import Attachment
    from kvd.client.connection import Call
    from kvd.client.device_event import WhenWritten
    from kvd.client.handoff import KeptRoom, Outcome
    from kvd.client.lease_key import LeaseKey
    from kvd.client.mover.blocks import Caches, EngineBlocks
    from kvd.client.port import Channel
    from kvd.client.state import EventQueue, EventsLost
    from kvd.client.tokens import TokenIds
    from kvd.client.worker import Worker
    from kvd.wire.events import Event
    from kvd.wire.page_address import ExtraKeys
    from kvd.wire.snapshot import Snapshot

NO_ROOM = 0
"""In a receive that pulls."""

NEVER_S = 3600.0
"""One wait for events; waiting goes on after it."""


class Node:
    """One session with the daemon of this node.

    When the daemon ends, calls and handoffs under way end with ``unreachable``, and this object
    looks for the one that takes its place. If that has the same pool, everything goes on: mapped
    memory, leases of before (see ``Lease``), and new calls, which wait for it meanwhile. If it has
    another, this node is over (``end``): every call raises ``pool-changed``, and no lease of it has
    pages any more; connect anew. ``session``, ``token`` and ``incarnation`` are those of now.
    """

    def __init__(
        self,
        attachment: Attachment,
        connection: Connection,
        channel: Channel,
        *,
        return_within_s: float = RETURN_WITHIN_S,
    ) -> None:
        """Use ``connect`` or ``connect_sync``."""
        self._attachment = attachment
        self._port = Port(connection, channel, return_within_s)
        self._port.called = f"session {attachment.attached.session} of {attachment.attached.node}"
        self._pools = Pools(attachment, lambda: connection.end)
        self._is_subscribed = False
        self._copier: Worker | None = None

    @property
    def name(self) -> str:
        """The daemon's name."""
        return self._attachment.attached.node

    @property
    def incarnation(self) -> str:
        """The daemon's life: another one after each restart."""
        return self._attachment.attached.incarnation

    @property
    def life(self) -> tuple[int, str]:
        """``session`` and ``incarnation``: what tells one life of the daemon from the next."""
        attached = self._attachment.attached
        return attached.session, attached.incarnation

    @property
    def session(self) -> int:
        """The number of this session, as tables and events show it."""
        return self._attachment.attached.session

    @property
    def token(self) -> bytes:
        """What another process of this session needs, for ``join``."""
        return self._attachment.attached.token

    @property
    def is_away(self) -> bool:
        """Whether the daemon has ended and is not back yet, as far as has been noticed."""
        return self._port.connection.back is not None

    @property
    def end(self) -> KvdError | None:
        """What every call raises from now on, as far as has been noticed; None while it is open.

        The session is over then, for good, and with it each lease, receive, send and arena: their
        page numbers are nobody's here. ``pool-changed``: the daemon is back with other memory, as
        with a pool of the default backing after each restart; or what the daemon refuses this
        session for. Close the node, connect anew, and map the pool again.
        """
        end = self._port.connection.end
        return None if end is None else KvdError(end)

    def check(self, key: LeaseKey) -> None:
        """Refuse page numbers that are not this session's any more: for where they are copied.

        It holds what ``key`` says against the session, the lease, and the pages that it has now, as
        far as has been read; it asks nobody, and takes some microseconds.

        Args:
            key: ``Lease.key`` of when the numbers were read.

        Raises:
            KvdError: what ended the session; ``unknown-session`` or ``before-restart`` for a key of
                another one or of another life of the daemon; ``unknown-lease`` for one that is
                over; ``wrong-state`` where its pages have become others since.
        """
        connection = self._port.connection
        if connection.end is not None:
            raise KvdError(connection.end)
        refusal = why_foreign(key, self._attachment.attached)
        refusal = refusal or why_stale(key, connection.has_lease(key.lease))
        if refusal is not None:
            raise KvdError(refusal)

    def owns(self, key: LeaseKey) -> bool:
        """Whether ``check`` has nothing against it."""
        return is_ours(self.check, key)

    def pool(self, name: str) -> Pool:
        """The pool of that name: what a page holds, and its memory.

        Raises:
            KvdError: ``bad-request`` when there is none; what ended the session, once it is over.
        """
        return self._pools.pool(name)

    def blocks(
        self,
        caches: Caches,
        *,
        block_size: int,
        pool: str = "",
        shard: int = 0,
        threads: int = 1,
        mark_within_s: float = MARK_WITHIN_S,
    ) -> EngineBlocks:
        """As ``Worker.blocks``, for an engine of one process.

        The first time it joins this session once more, as what a process copies is said on a
        connection of its own: for a tenth of a millisecond it waits for the daemon.

        Raises:
            KvdError: as ``Worker.blocks`` and ``join``.
        """
        found = self._pools.chosen(pool)
        if self._copier is None:
            self._copier = join(self._attachment.endpoint, token=self.token)
            self._attachment.copies = self._copier.movers
        return self._copier.movers.blocks(
            found,
            caches,
            block_size=whole(block_size, "block_size"),
            shard=whole(shard, "shard"),
            threads=whole(threads, "threads"),
            mark_within_s=mark_within_s,
            check=self.check,
        )

    def _sent_prompt(
        self,
        room: int,
        tokens: TokenIds | Prompt | None,
        keys: Sequence[bytes] | None,
        extra_keys: ExtraKeys | None,
    ) -> PromptAddress | None:
        """What of a lease is sent; None: all that it knows, for which a message has no tokens."""
        if tokens is None and keys is None:
            return None
        prompt = address_of(self._pools, tokens, keys, extra_keys)
        if prompt.frame:
            return prompt
        why = f"a prompt of 0 tokens for room {room}: leave them out to send all of the lease"
        raise KvdError(Refusal(Code.BAD_REQUEST, why, side="client", numbers={"tokens": 0}))

    def prompt(
        self,
        tokens: TokenIds | None = None,
        *,
        keys: Sequence[bytes] | None = None,
        extra_keys: ExtraKeys | None = None,
    ) -> Prompt:
        """A prompt that will be asked about more than once; sends nothing yet.

        Give it in the place of ``tokens``: each call sends what the daemon has not seen of it. A
        look-up of a known prompt of 32,000 tokens is a hundred bytes long.

        ``tokens``, ``keys`` and ``extra_keys`` are as in ``lease``.

        Raises:
            KvdError: ``bad-tokens``, ``bad-keys``.
        """
        address = PromptAddress(self._pools.match_page_tokens, tokens, keys, extra_keys)
        address.handle = Prompt(self._port, address)
        return address.handle

    async def lease(  # noqa: PLR0913 - the request, field by field
        self,
        tokens: TokenIds | Prompt | None = None,
        *,
        keys: Sequence[bytes] | None = None,
        extra_keys: ExtraKeys | None = None,
        hold: str = "all",
        namespace: str = "",
        reserve_tokens: int = 0,
        priority: int = 0,
        deadline_s: float = 30.0,
        cache: bool = True,
        step_tokens: int = 0,
        promise_tokens: int = 0,
        tiers: str = "",
    ) -> Lease:
        """Lock the cached prefix of ``tokens`` and hold pages for the rest; waits for room.

        Args:
            tokens: the prompt, or what ``prompt`` made of it.
            keys: instead of tokens: a key of 16 to 64 bytes for each page, all of one size. Who
                makes them sees to it that it, or those before it, stand for all tokens so far.
            extra_keys: what pages are found by beside their tokens, such as the hash of an image:
                bytes for every page, or by its number; what is committed later has them too.
            hold: ``prefix`` locks what is cached and takes no pages: the lease has those tokens
                only and grows by ``extend``. It never waits, so a full pool serves hits too.
            namespace: what isolates equal token ids: model, LoRA, cache salt.
            reserve_tokens: pages for so many more are held at once.
            priority: higher is admitted earlier.
            deadline_s: longest wait for room; 0 is answered at once. A daemon that does not answer
                is waited for 0.25 s then, one that is stopped 20 ms: ``deadline``.
            cache: whether a commit puts its pages into the prefix cache.
            step_tokens: where the pool has window pages: how far ahead of the last ``slide`` they
                are mapped, a fixed number that rotates; 0: one for each page of prompt and reserve.
            promise_tokens: pages for so many more, behind the reserve, are never short: ``extend``,
                or a commit with it, brings them. Until then cached KV stays in them, and is found.
            tiers: ``wait`` (if nothing is said) for pages of the prompt that lie in a tier below
                the pool, for a bounded time; ``now`` takes what is in the pool (``Lease.tiers``).

        Raises:
            KvdError: ``no-room``, ``too-large``, ``deadline`` with the numbers and the holders;
                ``bad-keys``, ``bad-tokens``; ``not-supported`` by an older daemon for a promise.
        """
        prompt = address_of(self._pools, tokens, keys, extra_keys)
        reserve, rank, step, promise = wholes(
            reserve_tokens=reserve_tokens,
            priority=priority,
            step_tokens=step_tokens,
            promise_tokens=promise_tokens,
        )
        if not prompt.frame and not reserve:
            raise KvdError(_of_nothing("lease", "give tokens, or reserve_tokens"))
        number, how = self._port.connection.next_call(), (cache, step, promise, tiers)
        opening = wire.OpenLease(number, namespace, reserve, rank, deadline_s, *how)
        request = opening if hold == "all" else _prefix_of(opening, hold)
        call = await perform_about(self._port, request, prompt, within_s=within(deadline_s))
        return self._leased(call, request, prompt)

    def _leased(
        self, call: Call, request: wire.OpenLease | wire.HoldPrefix, prompt: PromptAddress
    ) -> Lease:
        if call.lease is None:
            raise confused(request, call.answer.value)
        lease = Lease(self._port, self._pools, call.lease, prompt)
        if isinstance(request, wire.HoldPrefix):
            prompt.cut(call.lease.prefix_tokens)
        elif request.promise_tokens:
            unkept = _unkept(call.answer.value, request.promise_tokens)
            if unkept is not None:
                lease.leave()
                raise KvdError(unkept)
        return lease

    async def arena(self, pages: int) -> PageArena:
        """Pages that follow each other, whose content is this engine's alone; at once.

        Args:
            pages: so many.

        Raises:
            KvdError: ``no-room`` with the longest run of free pages; ``too-large`` for more than
                the pool has; ``not-supported`` where a pool has several components.
        """
        request = wire.OpenArena(self._port.connection.next_call(), whole(pages, "pages"))
        call = await self._port.perform(request)
        if call.lease is None:
            raise confused(request, call.answer.value)
        return PageArena(self._port, self._pools, call.lease)

    async def receive(  # noqa: PLR0913 - the request, field by field
        self,
        room: int | TokenIds | Prompt | None = None,
        tokens: TokenIds | Prompt | None = None,
        source: str | Sequence[str] = (),
        *,
        keys: Sequence[bytes] | None = None,
        extra_keys: ExtraKeys | None = None,
        namespace: str = "",
        reserve_tokens: int = 0,
        priority: int = 0,
        tier: str | None = None,
        deadline_s: float = 30.0,
        cache: bool = True,
        step_tokens: int = 0,
        request_id: str = "",
        promise_tokens: int = 0,
        is_open: bool = False,
        as_it_comes: bool = False,
        tiers: str = "",
    ) -> Receive:
        """Decode side: get the KV of ``tokens`` from ``source``; returns once pages are held.

        Args:
            room: the router's number; without one what is cached there is pulled (``n_tokens``).
            tokens: the prompt; only what is not cached here is sent. Or ``None``, and ``keys``.
            keys: as in ``lease``; both sides give the same.
            extra_keys: as in ``lease``; both sides give the same.
            source: a peer's name, tcp://HOST:PORT or NAME@tcp://HOST:PORT. Several divide the work.
            namespace: as in ``lease``.
            reserve_tokens: as in ``lease``.
            priority: as in ``lease``.
            tier: of KV in host memory: ``device`` preloads it if it fits, else ``fetch`` brings it.
            deadline_s: of the whole handoff; ``peer-unknown``, ``no-room`` ... are told at once,
                ``not-supported`` for a pull of several components, or from an older source.
            cache: as in ``lease``.
            step_tokens: as in ``lease``, for what is generated after the prompt.
            promise_tokens: as in ``lease``.
            request_id: the router's. Asked again it is the same receive; other prompts are refused.
            is_open: the room was open when it was told of; where it is not, none is waited for.
            as_it_comes: ``arriving`` has what has come, where that can be told.
            tiers: as in ``lease``, of this side: what is loaded from a tier is not sent.
        """
        number, asked = _met_in(room, tokens)
        met = self._port.connection.next_call(), number, names(source, "source"), namespace
        request = wire.ReceiveRequest(
            *met,
            reserve_tokens=whole(reserve_tokens, "reserve_tokens"),
            priority=whole(priority, "priority"),
            deadline_s=deadline_s,
            cache=cache,
            tier=tier,
            step_tokens=whole(step_tokens, "step_tokens"),
            request_id=request_id,
            promise_tokens=whole(promise_tokens, "promise_tokens"),
            is_open=is_open,
            as_it_comes=as_it_comes,
            tiers=tiers,
        )
        return await self._receiving(request, address_of(self._pools, asked, keys, extra_keys))

    async def _receiving(self, request: wire.ReceiveRequest, prompt: PromptAddress) -> Receive:
        within_s = within(request.deadline_s)
        if not prompt.frame:
            raise KvdError(_of_nothing("receive", "give the tokens of the prompt"))
        call = await perform_about(self._port, request, prompt, within_s=within_s)
        if call.receive is None:
            raise confused(request, call.answer.value)
        receive = Receive(self._port, self._pools, call.receive, prompt=prompt, within_s=within_s)
        unkept = _unkept(call.answer.value, request.promise_tokens)
        if unkept is not None:
            await receive.cancel()
            raise KvdError(unkept)
        return receive

    async def send(  # noqa: PLR0913 - the request, field by field
        self,
        room: int,
        tokens: TokenIds | Prompt | None = None,
        *,
        lease: Lease,
        keys: Sequence[bytes] | None = None,
        extra_keys: ExtraKeys | None = None,
        namespace: str = "",
        deadline_s: float = 30.0,
        to: str | None = None,
        ttl_s: float = 0.0,
        takers: int = 0,
        request_id: str = "",
        when_written: bool = False,
    ) -> Send:
        """Prefill side: hand the KV of ``tokens`` to who receives it in ``room``; at once.

        Args:
            room: the rendezvous number that the router chose.
            tokens: the prompt whose KV is or will be written into the pages of ``lease``; left out,
                like ``keys``: all that the lease knows.
            lease: its pages are read until the handoff has ended, even when it is released.
            keys: as in ``lease``.
            extra_keys: as in ``lease``.
            namespace: as in ``lease``.
            deadline_s: of the whole handoff.
            to: the node (or its configured address) whose engine receives it. No other one can take
                the room or end it, and it is heard at once when that one gives up. None: the first
                node with the same prompt has it; of several, one that gives up is not heard.
            ttl_s: keep the room for so many seconds behind ``finish``, and its pages with it, even
                if the lease is released: nodes with the same prompt may receive it, as often as
                they like, each from its own ``decode_prefix_len``. It ends with this session too.
                At most ``admission.max_deadline_s``; ``Send.renew`` prolongs it.
            takers: so many receives that commit end a kept room; 0: any number, and after the first
                its pages go when they are needed. Without ``ttl_s`` it is kept for ``deadline_s``.
            request_id: as in ``receive``. Of a room that was served the numbers of
                ``duplicate-room`` say who had it (``served_to``), and when (``served_ago_s``).
            when_written: of a room that is kept: nobody calls ``finish``, and it is finished when
                all of the prompt is written, as by the last copy of ``Worker.blocks``.

        Raises:
            KvdError: ``unknown-lease``, ``duplicate-room``, ``prompt-mismatch`` ...;
                ``layout-mismatch`` where the pages of node ``to`` do not fit; ``bad-request`` for a
                lease of another node.
        """
        request = wire.SendRequest(
            call=self._port.connection.next_call(),
            room=room_number(room),
            lease=lease_number(lease, self._port),
            namespace=namespace,
            deadline_s=deadline_s,
            peer=to,
            ttl_s=seconds(ttl_s, "ttl_s"),
            takers=whole(takers, "takers"),
            request_id=request_id,
            when_written=when_written,
        )
        prompt = self._sent_prompt(room, tokens, keys, extra_keys)
        return await sending(self._port, request, prompt, lease.record)

    async def keep_room(self, room: int, ttl_s: float) -> KeptRoom:
        """Keep a room that this session has opened for ``ttl_s`` from now on; 0 ends it.

        As ``Send.renew`` and ``Send.end``, for a room of ``hand_over``. One that another session of
        this node has handed over with ``takers=1`` is ended by who was to receive it and has found
        the prompt in the cache here.

        Raises:
            KvdError: as ``Send.renew``.
        """
        return await keep_room(self._port, room_number(room), ttl_s)

    async def hand_over(  # noqa: PLR0913 - the request, field by field
        self,
        room: int,
        tokens: TokenIds | Prompt | None = None,
        *,
        lease: Lease,
        keys: Sequence[bytes] | None = None,
        extra_keys: ExtraKeys | None = None,
        aux: bytes = b"",
        namespace: str = "",
        deadline_s: float = 30.0,
        to: str | None = None,
        after: WhenWritten | bytes | None = None,
        release: bool = False,
        ttl_s: float = 0.0,
        takers: int = 0,
        request_id: str = "",
    ) -> Outcome:
        """``send`` and ``Send.finish`` in one message, for what is all computed.

        Args:
            room: as in ``send``.
            tokens: as in ``send``.
            lease: as in ``send``.
            keys: as in ``send``.
            extra_keys: as in ``send``.
            aux: as in ``Send.finish``.
            namespace: as in ``send``.
            deadline_s: as in ``send``.
            to: as in ``send``.
            after: as in ``Send.advance``; an event object is kept until this returns.
            release: as in ``Send.finish``; also where ``request_id`` finds an earlier call's send.
            ttl_s: as in ``send``; ``keep_room`` prolongs it.
            takers: as in ``send``.
            request_id: as in ``send``; the earlier call ends with ``cancelled``.

        Returns as ``Send.finish``; a caller that goes away before ends the handoff.

        Raises:
            KvdError: as ``send``, ``too-large`` for an aux. A refusal releases nothing.
        """
        prompt = self._sent_prompt(room, tokens, keys, extra_keys)
        request = wire.HandOver(
            call=self._port.connection.next_call(),
            room=room_number(room),
            lease=lease_number(lease, self._port),
            namespace=namespace,
            deadline_s=deadline_s,
            peer=to,
            aux=opaque(aux, "aux"),
            after=handle_of(after),
            ends_lease=release,
            ttl_s=seconds(ttl_s, "ttl_s"),
            takers=whole(takers, "takers"),
            request_id=request_id,
        )
        call = await perform_about(
            self._port, request, prompt, about=lease.record, within_s=within(deadline_s)
        )
        return outcome(request, call)

    async def match(
        self,
        tokens: TokenIds | Prompt | None = None,
        *,
        keys: Sequence[bytes] | None = None,
        extra_keys: ExtraKeys | None = None,
        namespace: str = "",
    ) -> Matched:
        """How much of the prompt is cached here, and how busy the node is; changes nothing.

        ``tokens``, ``keys``, ``extra_keys`` and ``namespace`` are as in ``lease``.

        Cached is the KV of the first component. A lease goes on from there only where what lies
        beside it is cached too, a window or a state; else from the last place where it is, or from
        the start. A receive has that sent anyway, with the end of the prompt for a window.
        """
        request = wire.MatchPrefix(self._port.connection.next_call(), namespace)
        return await self._matched(request, address_of(self._pools, tokens, keys, extra_keys))

    async def prefetch(self, tokens: TokenIds | Prompt, *, namespace: str = "") -> Matched:
        """Say that this prompt will be asked for: what a tier has of it begins to be read now.

        The answer is that of ``match`` and waits for nothing: ``tier_tokens`` are on their way, as
        far as there is room for them. No page is kept for this session.
        """
        request = PrefetchPrompt(self._port.connection.next_call(), namespace)
        return await self._matched(request, address_of(self._pools, tokens, None, None))

    async def _matched(
        self, request: wire.MatchPrefix | PrefetchPrompt, prompt: PromptAddress
    ) -> Matched:
        found = (await perform_about(self._port, request, prompt)).answer.value
        if not isinstance(found, wire.MatchReply):
            raise confused(request, found)
        return Matched(
            tokens=found.tokens,
            load=found.load,
            free=found.free,
            tier_tokens=found.tier_tokens,
            tier_ms=found.tier_ms,
        )

    async def flush(self, namespace: str = "") -> FlushResult:
        """Drop what is cached of a namespace now and not locked; for all engines of the node.

        What is locked stays and is found again, and so is what leases of now commit later: after
        new weights say ``new_epoch``.

        Args:
            namespace: of a base (no ``#`` in it) all its members too: ``llama`` drops ``llama``
                and every ``llama#...``, ``llama#salt=1`` that alone.
        """
        return await self._flushed(
            wire.FlushNamespace(self._port.connection.next_call(), namespace)
        )

    async def new_epoch(self, namespace: str, epoch: int | None = None) -> FlushResult:
        """The weights of a model have changed: nothing of it that was cached is found again.

        An epoch is of a base and its members: ``llama``, and every ``llama#...`` that a salt or an
        adapter makes of it. It counts for every call behind this one, and is answered when it is on
        disk: the next daemon of this node begins in it. Each engine of a node may say the same
        number: the first one counts.

        What is not locked is dropped now. Leases of before keep their pages and may go on; what
        they commit is found by nobody. Sends that nobody has begun to receive end, kept rooms too;
        what is being received is received. Handoffs and pulls between nodes in different epochs are
        refused as ``prompt-mismatch``, with both numbers.

        Args:
            namespace: of any member of the base. It is in epoch 0 at first.
            epoch: the number of the weights; it goes up only. None: the next one; the answer says
                which that is.

        Raises:
            KvdError: ``wrong-state`` for an epoch below that of now, with both; ``aborted`` where
                it cannot be written down: it counts until the daemon ends.
        """
        number = None if epoch is None else whole(epoch, "epoch")
        request = wire.BeginEpoch(self._port.connection.next_call(), namespace, number)
        return await self._flushed(request)

    async def _flushed(self, request: wire.FlushNamespace | wire.BeginEpoch) -> FlushResult:
        found = await self._port.ask(request, wire.FlushReport)
        return FlushResult(
            freed_pages=found.freed_pages,
            kept_pages=found.kept_pages,
            kept=found.kept,
            epoch=found.epoch,
        )

    async def pin(
        self,
        tokens: TokenIds | Prompt,
        *,
        ttl_s: float,
        owner: str = "",
        namespace: str = "",
        tiers: str = "",
    ) -> PinnedPrefix:
        """Keep what is cached of a prompt, softly: it is the last to be evicted or demoted.

        What lies in a tier below the pool is waited for as in ``lease`` (``tiers``), and takes the
        room of what is evicted. So a prompt that is known is pinned anew by this after a restart.

        A request that can have no other pages takes these, and the pin is over (``pin-ended``), or
        goes on in a tier that has all of it (``pin-left-pool``). It ends after ``ttl_s``, by
        ``unpin``, with this session, with a new epoch of its namespace, and with the daemon: none
        outlives a restart. ``owner`` is shown: this session, if left out.

        Raises:
            KvdError: ``bad-request`` where nothing is cached of it, ``no-room`` for a pin too many,
                ``not-supported`` by a pool that has windows or states.
        """
        call, ttl_s = self._port.connection.next_call(), seconds(ttl_s, "ttl_s")
        request = PinPrefix(call=call, namespace=namespace, ttl_s=ttl_s, owner=owner, tiers=tiers)
        prompt = address_of(self._pools, tokens, None, None)
        found = (await perform_about(self._port, request, prompt)).answer.value
        if not isinstance(found, PrefixPinned):
            raise confused(request, found)
        return PinnedPrefix(pin=found.pin, tokens=found.tokens)

    async def unpin(self, pin: PinnedPrefix) -> PinnedPrefix:
        """End a pin of this session, and return it; one that is over raises ``bad-request``."""
        await self._port.ask(UnpinPrefix(self._port.connection.next_call(), pin.pin), wire.Done)
        return pin

    async def snapshot(self) -> Snapshot:
        """The daemon's whole state: what ``kvd status --format json`` prints."""
        request = wire.GetSnapshot(self._port.connection.next_call())
        return (await self._port.ask(request, wire.Snapshotted)).snapshot

    async def events(self) -> AsyncGenerator[Event | EventsLost, None]:
        """Everything that happens from now on, in order; a gap is an ``EventsLost``.

        A restart of the daemon is such a gap; what follows it are events of its next life.

        Raises:
            KvdError: ``unreachable`` when the daemon is away from the start, ``pool-changed`` when
                it came back with other memory.
        """
        connection = self._port.connection
        queue = connection.open_events()
        try:
            if not self._is_subscribed:
                await self._port.ask(wire.Subscribe(connection.next_call()), wire.Done)
                self._is_subscribed = True
            while True:
                yield await self._next_event(queue)
        finally:
            if connection.close_events(queue):
                self._is_subscribed = False
                self._port.tell(wire.Unsubscribe(connection.next_call()))

    async def close(self) -> None:
        """Leave the session: the daemon releases what it held. Live views stay valid.

        Copies to and from blocks that move are waited for, and none begins any more.
        """
        if self._copier is not None:
            self._copier.close()
        self._port.close()
        self._pools.close()

    async def _next_event(self, queue: EventQueue) -> Event | EventsLost:
        while True:
            event = queue.take()
            if event is not None:
                return event
            if queue.end is not None:
                raise KvdError(queue.end)
            await self._port.idle(queue.news, NEVER_S)


class Connecting:
    """What ``connect`` returns: ``async with`` it, or ``await`` it and ``close`` the node."""

    def __init__(
        self,
        endpoint: str | None,
        name: str,
        return_within_s: float,
        *,
        key: str,
        expects: Mapping[str, str | int] | None,
        kind: str,
        within_s: float,
    ) -> None:
        self._within_s = within_s
        self._kind = kind
        self._endpoint = endpoint
        self._name = name
        self._key = key
        self._expects = expects
        self._return_within_s = return_within_s
        self._node: Node | None = None

    def __await__(self) -> Generator[object, None, Node]:
        return self._open().__await__()

    async def __aenter__(self) -> Node:
        self._node = await self._open()
        return self._node

    async def __aexit__(self, *_: object) -> None:
        if self._node is not None:
            await self._node.close()

    async def _open(self) -> Node:
        endpoint = client_endpoint(self._endpoint)
        request = Attach(self._name, key=self._key, kind=self._kind)
        attachment = await attach(endpoint, request, self._within_s)
        attachment.require(self._expects)
        attachment.key, attachment.kind = self._key, self._kind
        connection = Connection(max_frame_bytes=attachment.attached.max_frame_bytes)
        with attachment.or_left():
            channel = LoopChannel(endpoint, attachment, connection, self._name)
        return Node(attachment, connection, channel, return_within_s=self._return_within_s)


def connect(
    endpoint: str | None = None,
    *,
    name: str,
    return_within_s: float = RETURN_WITHIN_S,
    key: str = "",
    expects: Mapping[str, str | int] | None = None,
    kind: str = "",
    within_s: float = ATTACH_WITHIN_S,
) -> Connecting:
    """Open a session with the daemon of this node.

    Args:
        endpoint: ``ipc:///...``; left out: KVD_SOCKETS__CLIENT, else where a daemon would listen.
        name: what leases, events and tables call this engine, for example ``decode-0``.
        return_within_s: how long a call waits for a daemon that ended to be back; then it raises
            ``unreachable``. A call with a shorter limit of its own waits no longer than that.
        key: a string that the processes of this engine share, for example drawn by their launcher:
            others of the same user join this session by it, also those that ask before it is there.
        expects: what the pool must be for this engine, by keys of ``[pool]``: ``family``,
            ``order``, ``interior``, ``tag``, ``page_size``.
        kind: what the engine is, for whoever looks: ``vllm 0.32.0``. Left out: ``kvd.client``.
        within_s: how long a daemon that is stopped or busy may take to answer; then it raises
            ``unreachable``.

    Raises:
        KvdError: on entering: ``unreachable`` with what to do, ``wrong-state`` when another engine
            with that key lives, ``layout-mismatch`` where the pool is not as ``expects`` says, or
            another refusal of the daemon.
    """
    return Connecting(
        endpoint, name, return_within_s, key=key, expects=expects, kind=kind, within_s=within_s
    )


def _of_nothing(what: str, fix: str) -> Refusal:
    why = f"a {what} of 0 tokens would have no page: {fix}"
    return Refusal(Code.BAD_REQUEST, why, side="client", numbers={"tokens": 0})


def _unkept(answer: object, promise_tokens: int) -> Refusal | None:
    """Why what was granted is not what was asked for: a promise that is not made is none."""
    if not promise_tokens or not isinstance(answer, wire.Leased | wire.Receiving):
        return None
    if answer.promised_tokens >= promise_tokens:
        return None
    return Refusal(
        Code.NOT_SUPPORTED,
        f"{answer.promised_tokens} of {promise_tokens} tokens were promised: the daemon is older "
        "than this client and knows no promises; ask without promise_tokens, or upgrade it",
        side="client",
        numbers={"promise_tokens": promise_tokens, "promised_tokens": answer.promised_tokens},
    )


def _prefix_of(opening: wire.OpenLease, hold: str) -> wire.HoldPrefix:
    beyond = opening.reserve_tokens or opening.promise_tokens
    if hold != "prefix" or beyond or opening.step_tokens:
        why = (
            f"hold={hold!r} with {opening.reserve_tokens} tokens in reserve, "
            f"{opening.promise_tokens} promised, {opening.step_tokens} at a time: "
            '"all" takes pages for the whole prompt and the reserve, "prefix" takes none'
        )
        raise KvdError(Refusal(Code.BAD_REQUEST, why, side="client"))
    return wire.HoldPrefix(opening.call, opening.namespace, opening.priority, opening.cache)


def _is_prompt(room: int | TokenIds | Prompt | None) -> TypeGuard[TokenIds | Prompt]:
    return room is not None and not isinstance(room, int)


def _met_in(
    room: int | TokenIds | Prompt | None, tokens: TokenIds | Prompt | None
) -> tuple[int, TokenIds | Prompt | None]:
    """The room of a receive, and the prompt; a prompt in its place, or no room, is a pull."""
    if tokens is None and _is_prompt(room):
        return NO_ROOM, room
    if room is None:
        return NO_ROOM, tokens
    return room_number(room), tokens  # type: ignore[arg-type]  # which says what is wrong with it
