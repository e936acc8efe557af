"""Leases whose requests are over, or go on without them, until no copy to their pages is under way.

A page is given back only when the workers have answered every order that names it: an order may
still lie with a slow worker while the page is another's already. So a lease ends here, and nowhere
else, once its copies are over: shared and released, handed over, or just released.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvd.client import SyncLease
    from kvd.connectors.vllm.options import VllmOptions
    from kvd.connectors.vllm.sessions import NodeLink
    from kvd.connectors.vllm.tracked import Tracked

ENDING_STEPS: Final = 16
ENDING_WITHIN_S: Final = 1.0
"""Orders that are not answered so many steps later, and so long, are not going to be: steps overlap
by two or three. Then the session is given up; its pages stay held until the workers have left."""


class EndingLease:
    """One of them. ``shares``: what was saved is to be found by others, or handed over."""

    __slots__ = ("lease", "link", "looks", "shares", "since_s", "tracked")

    def __init__(
        self,
        tracked: Tracked,
        lease: SyncLease,
        link: NodeLink,
        *,
        shares: bool,
        since_s: float,
    ) -> None:
        self.tracked = tracked
        self.lease = lease
        self.link = link
        self.shares = shares
        self.since_s = since_s
        self.looks = 0

    def is_free(self, answered: int) -> bool:
        """Whether the workers have answered all orders up to the last one that names its pages."""
        return not self.tracked.is_load_ordered and self.tracked.last_order <= answered


class Endings:
    """All of them."""

    def __init__(self, options: VllmOptions) -> None:
        self._options = options
        self._answered = 0
        """Of the last step whose orders the workers have answered."""
        self._leases: list[EndingLease] = []

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, tracked: Tracked, link: NodeLink, *, shares: bool, now_s: float) -> None:
        """Its request needs the lease no more."""
        lease, tracked.lease = tracked.lease, None
        if lease is not None:
            ending = EndingLease(tracked, lease, link, shares=shares, since_s=now_s)
            self._leases.append(ending)
            self.settle()

    def find(self, request_id: str, number: int) -> Tracked | None:
        """The request of that name for which something was ordered in that step."""
        for ending in self._leases:
            tracked = ending.tracked
            if tracked.id == request_id and tracked.born <= number <= tracked.last_order:
                return tracked
        return None

    def loaded(self, request_id: str) -> None:
        """The workers read no page for that request any more."""
        for ending in self._leases:
            if ending.tracked.id == request_id:
                ending.tracked.is_load_ordered = False

    def answered(self, number: int) -> None:
        """The workers have answered the orders of that step, and of those before it."""
        self._answered = max(self._answered, number)

    def settle(self) -> None:
        """End those to whose pages no copy is under way."""
        leases, self._leases = self._leases, []
        for ending in leases:
            if ending.is_free(self._answered):
                self._end(ending)
            else:
                ending.looks += 1
                self._leases.append(ending)

    def are_overdue(self, now_s: float) -> bool:
        """Whether the workers are not going to answer."""
        return any(
            ending.looks > ENDING_STEPS and now_s - ending.since_s > ENDING_WITHIN_S
            for ending in self._leases
        )

    def life_is_over(self, link: NodeLink | None) -> None:
        """Leases of before can be released in the session that goes on, ``link``, and no more.

        Those of a session that is left end with it, once the workers have left it too.
        """
        self._leases = [ending for ending in self._leases if ending.link is link]
        self.share_nothing()

    def share_nothing(self) -> None:
        """What these have saved is for nobody: they are released, and no more."""
        for ending in self._leases:
            ending.shares = False

    def _end(self, ending: EndingLease) -> None:
        tracked, lease, link = ending.tracked, ending.lease, ending.link

        def just_release() -> None:
            link.quietly(lease.begin_release)

        if not ending.shares:
            just_release()
            return
        upto, prompt_tokens = tracked.saved_tokens, tracked.prompt_tokens
        if tracked.room and upto >= prompt_tokens:
            more = tracked.unknown_tokens(prompt_tokens)
            link.quietly(lease.begin_commit, more, prompt_tokens, swap=False)
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
                otherwise=just_release,
            )
            return
        # Only whole pages of what was saved, whatever was generated behind it.
        more = tracked.unknown_tokens(upto)
        link.quietly(lease.begin_release, more, upto, otherwise=just_release)
