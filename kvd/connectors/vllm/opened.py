"""Rooms that are open while their prompts are computed: what is saved is sent at once.

A prompt that another node will decode has a room from its first step on. Its daemon sends each page
to whoever has come there when the copy to that page is over, and finishes the room by itself when
the last of the prompt is there: no step of this engine stands between. Where the daemon does not
take it, the prompt is handed over when it is computed, as a whole (``endings``).

The room is the router's, where it has named one, so that the other node can come while this one
computes. A request that ends before all of it is computed ends its room too, and whoever waits
there hears why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvd.client import KvdError
from kvd.connectors.vllm.params import draw_room

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.client import SyncSend
    from kvd.connectors.vllm.options import VllmOptions
    from kvd.connectors.vllm.sessions import NodeLink
    from kvd.connectors.vllm.tracked import Tracked


UNSENT: Final = "the prompt was not computed to its end, or not copied"


class OpenedRooms:
    """Those of one engine.

    Args:
        options: what the user has set.
        is_sent: whether a prompt is to be decoded elsewhere, and there are pages for all of it.
    """

    def __init__(self, options: VllmOptions, is_sent: Callable[[Tracked], bool]) -> None:
        self._options = options
        self._is_sent = is_sent

    def open(self, tracked: Tracked) -> None:
        """It is computed from now on: whoever decodes it may come, if there are pages for it."""
        link, lease = tracked.link, tracked.lease
        if tracked.room or link is None or lease is None or not tracked.claims_all:
            return
        if tracked.is_broken or not self._is_sent(tracked):
            return
        room = tracked.transfer.room or draw_room()
        try:
            tracked.opening = link.ask(
                link.node.begin_send,
                room,
                lease=lease,
                namespace=tracked.namespace,
                deadline_s=self._options.deadline_s,
                ttl_s=self._options.keep_s,
                takers=1,  # one decode engine has it; then its pages are not locked any more
                when_written=True,
            )
        except KvdError:
            return
        tracked.room = room

    def told(self, tracked: Tracked) -> bool:
        """It is computed: name its room, if it has none yet; whether that is known to be open."""
        send = self._opened(tracked)
        if send is not None and send.outcome is None:
            return True
        if not tracked.room:  # its pages came late, or are still to come
            tracked.room = tracked.transfer.room or draw_room()
        elif tracked.opening is None:
            # Refused, or over: it is handed over in another one, where nobody was turned away.
            tracked.room, tracked.send = draw_room(), None
        return False

    def _opened(self, tracked: Tracked) -> SyncSend | None:
        link, opening = tracked.link, tracked.opening
        if link is not None and opening is not None:
            try:
                tracked.send = link.poll(opening)
            except KvdError:
                tracked.opening = None
            if tracked.send is not None:
                tracked.opening = None
        return tracked.send


def end_room(tracked: Tracked, link: NodeLink) -> None:
    """Nothing comes of it: whoever waits there hears so."""
    opening, send, tracked.opening, tracked.send = tracked.opening, tracked.send, None, None
    if opening is None and send is None:
        return
    tracked.room = 0
    if opening is not None:
        link.cancel(opening)
    if send is not None and send.outcome is None:
        link.quietly(send.begin_abort, UNSENT)
