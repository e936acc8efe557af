"""Pages of the pool that an engine keeps its own KV in: handoffs to and from there without a copy.

    arena = await node.arena(pages=4096)
    got = await arena.receive(room, tokens, "prefill-0", pages=ids, have_tokens=1024)
    await got.done()                      # the KV is in those pages, behind what was there already
    ...
    sent = await arena.send(room, tokens, pages=ids)

kvd does not know what is in an arena: nothing of it is looked up, cached, or kept over the death of
its engine. The blocking client has the same verbs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.client.arguments import opaque, seconds, whole
from kvd.client.device_event import handle_of
from kvd.client.handoff import Receive, Send, outcome, room_number, sending
from kvd.client.lease import Lease
from kvd.client.port import confused, within
from kvd.client.prompt import PromptAddress, address_of, perform_about
from kvd.client.rows import page_frame
from kvd.wire import client as wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvd.client.device_event import WhenWritten
    from kvd.client.handoff import Outcome
    from kvd.client.lease_key import LeaseKey
    from kvd.client.pool import Pools
    from kvd.client.port import Port
    from kvd.client.prompt import Prompt
    from kvd.client.rows import PageNumbers
    from kvd.client.state import LeaseView
    from kvd.client.tokens import TokenIds
    from kvd.wire.page_address import ExtraKeys


class PageArena:
    """Pages that follow each other. They are the engine's until ``close``, or its death.

    After a restart of the daemon they stay the engine's to read and write, and can only be closed.
    """

    def __init__(self, port: Port, pools: Pools, state: LeaseView) -> None:
        self._port = port
        self._pools = pools
        self._state = state
        self._lease = Lease(port, pools, state, PromptAddress(pools.match_page_tokens, ()))

    @property
    def id(self) -> int:
        """Its number, as ``kvd why lease`` takes it."""
        return self._state.number

    @property
    def pages(self) -> NDArray[np.int32]:
        """Its page ids, ``first_page`` and those behind it; read-only, int32, one dimension.

        Raises:
            KvdError: once they are not the engine's any more, as ``Lease.pages``: after ``close``,
                when the session is over, when a daemon that is back has not kept them.
        """
        return self._lease.pages

    @property
    def key(self) -> LeaseKey:
        """As ``Lease.key``.

        Raises:
            KvdError: as ``pages``.
        """
        return self._lease.key

    @property
    def first_page(self) -> int:
        """The lowest of them: page ``i`` of the arena is page ``first_page + i`` of the pool.

        Raises:
            KvdError: as ``pages``.
        """
        return int(self._lease.pages[0])

    @property
    def is_closed(self) -> bool:
        """Whether the pages are not the engine's any more: closed, or lost with the session."""
        state = self._state
        return state.is_released or state.over is not None or not state.is_kept

    async def receive(  # noqa: PLR0913 - the request, field by field
        self,
        room: int,
        tokens: TokenIds | Prompt | None = None,
        source: str = "",
        *,
        pages: PageNumbers,
        have_tokens: int = 0,
        keys: Sequence[bytes] | None = None,
        extra_keys: ExtraKeys | None = None,
        namespace: str = "",
        deadline_s: float = 30.0,
        request_id: str = "",
    ) -> Receive:
        """As ``Node.receive``, but the KV lands in pages of the arena, and no lease comes of it.

        From now until it is ``done``, or ``safe`` where it has failed, the pages are not the
        engine's: a remote writes them.

        Args:
            room: as in ``Node.receive``.
            tokens: as in ``Node.receive``.
            source: one peer.
            pages: where it lands: one page for each page of the tokens from ``have_tokens`` on, in
                their order, the last partial one too.
            have_tokens: so many first tokens' KV the engine has, whole pages; they are not sent.
            keys: as in ``Node.receive``.
            extra_keys: as in ``Node.receive``.
            namespace: as in ``Node.receive``.
            deadline_s: as in ``Node.receive``.
            request_id: as in ``Node.receive``.

        Raises:
            KvdError: as ``Node.receive``; ``bad-request`` for pages that are none of the arena, are
                named twice, or are too few or too many; ``wrong-state`` for pages that another
                handoff reads or writes.
        """
        prompt = address_of(self._pools, tokens, keys, extra_keys)
        request = wire.ReceiveRequest(
            call=self._port.connection.next_call(),
            room=room_number(room),
            source=(source,),
            namespace=namespace,
            deadline_s=deadline_s,
            cache=False,
            request_id=request_id,
            arena=self.id,
            pages=page_frame(pages),
            have_tokens=whole(have_tokens, "have_tokens"),
        )
        within_s = within(deadline_s)
        call = await perform_about(
            self._port, request, prompt, about=self._state, within_s=within_s
        )
        if call.receive is None:
            raise confused(request, call.answer.value)
        return Receive(self._port, self._pools, call.receive, prompt=prompt, within_s=within_s)

    async def send(  # noqa: PLR0913 - the request, field by field
        self,
        room: int,
        tokens: TokenIds | Prompt | None = None,
        *,
        pages: PageNumbers,
        keys: Sequence[bytes] | None = None,
        extra_keys: ExtraKeys | None = None,
        namespace: str = "",
        deadline_s: float = 30.0,
        to: str | None = None,
        ttl_s: float = 0.0,
        takers: int = 0,
        request_id: str = "",
    ) -> Send:
        """As ``Node.send``, of pages of the arena: ``advance`` and ``finish`` say how far they are.

        They are the engine's to read all along, and to write again once ``finish`` has returned.

        Args:
            room: as in ``Node.send``.
            tokens: the prompt; or ``None``, and ``keys``.
            pages: one page for each page of the tokens, from the first on.
            keys: as in ``Node.send``.
            extra_keys: as in ``Node.send``.
            namespace: as in ``Node.send``.
            deadline_s: as in ``Node.send``.
            to: as in ``Node.send``.
            ttl_s: as in ``Node.send``.
            takers: as in ``Node.send``.
            request_id: as in ``Node.send``.

        Raises:
            KvdError: as ``Node.send``, and for pages as ``receive``.
        """
        prompt = address_of(self._pools, tokens, keys, extra_keys)
        request = wire.SendRequest(
            call=self._port.connection.next_call(),
            room=room_number(room),
            lease=self.id,
            namespace=namespace,
            deadline_s=deadline_s,
            peer=to,
            ttl_s=seconds(ttl_s, "ttl_s"),
            takers=whole(takers, "takers"),
            request_id=request_id,
            pages=page_frame(pages),
        )
        return await sending(self._port, request, prompt, self._state)

    async def hand_over(  # noqa: PLR0913 - the request, field by field
        self,
        room: int,
        tokens: TokenIds | Prompt | None = None,
        *,
        pages: PageNumbers,
        keys: Sequence[bytes] | None = None,
        extra_keys: ExtraKeys | None = None,
        aux: bytes = b"",
        namespace: str = "",
        deadline_s: float = 30.0,
        to: str | None = None,
        after: WhenWritten | bytes | None = None,
        ttl_s: float = 0.0,
        takers: int = 0,
        request_id: str = "",
    ) -> Outcome:
        """``send`` and ``Send.finish`` in one message, for what is all computed.

        The arguments are those of ``send`` and of ``Node.hand_over``.

        Raises:
            KvdError: as ``send``, ``too-large`` for an aux.
        """
        prompt = address_of(self._pools, tokens, keys, extra_keys)
        request = wire.HandOver(
            call=self._port.connection.next_call(),
            room=room_number(room),
            lease=self.id,
            namespace=namespace,
            deadline_s=deadline_s,
            peer=to,
            aux=opaque(aux, "aux"),
            after=handle_of(after),
            ttl_s=seconds(ttl_s, "ttl_s"),
            takers=whole(takers, "takers"),
            request_id=request_id,
            pages=page_frame(pages),
        )
        call = await perform_about(
            self._port, request, prompt, about=self._state, within_s=within(deadline_s)
        )
        return outcome(request, call)

    async def close(self) -> None:
        """Give the pages back; repeatable. Receives into them are given up, sends go on.

        Pages that a remote may still write come back to the pool when it cannot any more.
        """
        if not self.is_closed:
            await self._lease.release()
