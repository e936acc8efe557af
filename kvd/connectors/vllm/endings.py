"""Leases whose requests are over, or go on without them, until no copy to their pages is under way.

A page is given back only when all ranks have answered every order that names it, however long that
takes. The daemon gives away no page under a copy that it was told of either; but an order may still
lie with a slow worker, and what it saves is to be shared. So a lease ends here, and nowhere else,
once its copies are over: shared and released, handed over, or just released.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.connectors.vllm.opened import end_room

if TYPE_CHECKING:
    from kvd.client import SyncLease
    from kvd.connectors.vllm.options import VllmOptions
    from kvd.connectors.vllm.sessions import NodeLink
    from kvd.connectors.vllm.tracked import Tracked


class EndingLease:
    """One of them. ``shares``: what was saved is to be found by others, or handed over."""

    __slots__ = ("lease", "link", "shares", "tracked")

    def __init__(self, tracked: Tracked, lease: SyncLease, link: NodeLink, *, shares: bool) -> None:
        self.tracked = tracked
        self.lease = lease
        self.link = link
        self.shares = shares


class Endings:
    """All of them."""

    def __init__(self, options: VllmOptions) -> None:
        self._options = options
        self.leases: list[EndingLease] = []

    def __len__(self) -> int:
        return len(self.leases)

    def add(self, tracked: Tracked, link: NodeLink, *, shares: bool) -> None:
        """Its request needs the lease no more."""
        lease, tracked.lease = tracked.lease, None
        if not shares:
            end_room(tracked, link)
        if lease is None:
            return
        ending = EndingLease(tracked, lease, link, shares=shares)
        if tracked.copies:
            self.leases.append(ending)
        else:
            self._end(ending)

    def settle(self) -> None:
        """End those to whose pages no copy is under way."""
        leases, self.leases = self.leases, []
        for ending in leases:
            if ending.tracked.copies:
                self.leases.append(ending)
            else:
                self._end(ending)

    def life_is_over(self, link: NodeLink | None) -> None:
        """Leases of before can be released in the session that goes on, ``link``, and no more.

        Those of a session that is left end with it, once the workers have left it too.
        """
        self.leases = [ending for ending in self.leases if ending.link is link]
        self.share_nothing()

    def share_nothing(self) -> None:
        """What these have saved is for nobody: they are released, and no more."""
        for ending in self.leases:
            ending.shares = False
            end_room(ending.tracked, ending.link)

    def forget_adapter(self, number: int) -> None:
        """What was saved of that one is for nobody: it may be of other weights."""
        for ending in self.leases:
            if ending.tracked.naming.number == number:
                ending.shares = False
                end_room(ending.tracked, ending.link)

    def _end(self, ending: EndingLease) -> None:
        tracked, lease, link = ending.tracked, ending.lease, ending.link
        if not ending.shares:
            link.say(lease.leave)
            return
        upto, prompt_tokens = tracked.saved_tokens, tracked.request.num_prompt_tokens
        is_all, is_open = upto >= prompt_tokens, bool(tracked.send or tracked.opening)
        if is_open and not is_all:
            end_room(tracked, link)
        if tracked.room and is_all and not is_open:
            link.say(lease.share, tracked.unknown_tokens(prompt_tokens), prompt_tokens)
            link.quietly(
                link.node.begin_hand_over,
                tracked.room,
                lease=lease,
                namespace=tracked.namespace,
                deadline_s=self._options.deadline_s,
                ttl_s=self._options.keep_s,
                takers=1,  # one decode engine has it; then its pages are not locked any more
                release=True,
                # Refused, as by a node that drains: then the lease is not released either.
                otherwise=lambda: link.say(lease.leave),
            )
            return
        # Only whole pages of what was saved, whatever was generated behind it.
        if not link.say(lease.leave, tracked.unknown_tokens(upto), upto):
            link.say(lease.leave)
