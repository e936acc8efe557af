"""Pages of one host pool by their chain: looked up, saved into the node's pool, loaded from there.

A lease is there before the first byte and until the last one, and the mover copies: no byte passes
through Python, and none moves before the daemon has said that the pages are the lease's. A page of
SGLang's is given back to it only when no byte of it can move any more, however its copy has ended;
so a copy that takes too long is given up first, and then waited for.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from kvd.client import KvdError
from kvd.connectors.sglang.chains import strands_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.client import PendingCopy, SyncLease
    from kvd.connectors.sglang.chains import PageChain, PageStrand
    from kvd.connectors.sglang.host_pages import HostPages
    from kvd.connectors.sglang.storage_link import StorageLink, StorageSession

logger = logging.getLogger("kvd.connectors.sglang")

COPY_WITHIN_S: Final = 2.0
"""An order is waited for so long, and so much longer as its bytes take ..."""

SLOW_BYTES_PER_S: Final = 200 * 2**20
"""... where memory is as slow as this; then it is given up."""

SAFE_LOOK_S: Final = 1.0
"""Of a copy that was given up it is looked so often whether bytes still move: some milliseconds."""


class StoreCounts(Counter[str]):
    """Pages that were ``found``, ``loaded``, ``saved``; ``there`` already when they were saved."""


class HeldPages(NamedTuple):
    """Pages of a chain that stay where they are until they are loaded, or left."""

    chain: PageChain
    parts: tuple[tuple[SyncLease, PageStrand], ...]
    life: object
    """Of the session that they are held in."""

    @property
    def n_pages(self) -> int:
        """Those that are asked about, from the first one on."""
        return self.parts[-1][1].end - self.chain.first if self.parts else 0


class PageStore:
    """What of one host pool the node keeps.

    Args:
        link: to the daemon.
        pages: of the host pool.
        namespace: whose they are.
    """

    def __init__(self, link: StorageLink, pages: HostPages, namespace: str) -> None:
        self._link, self.pages, self.namespace = link, pages, namespace
        self.counts = StoreCounts()

    def found(self, chain: PageChain) -> int:
        """How many of the pages that are asked about are there, from the first one on."""
        end = chain.first
        with self._link.asked() as session:
            if session is None:
                return 0
            for strand in strands_of(chain, lambda keys: session.matched(keys, self.namespace)):
                end = strand.end
        self.counts["found"] += end - chain.first
        return end - chain.first

    def each_found(self, chains: Sequence[PageChain]) -> list[bool]:
        """Of chains of one page each, which are there; asked together."""
        with self._link.asked() as session:
            if session is None:
                return [False] * len(chains)
            return session.each_matched([chain.keys for chain in chains], self.namespace)
        return [False] * len(chains)

    def hold(self, chain: PageChain) -> HeldPages:
        """As ``found``, and what is found is evicted by nobody: leave it, or load it."""
        parts: list[tuple[SyncLease, PageStrand]] = []
        leases: list[SyncLease] = []
        life = None
        with self._link.asked() as session:
            if session is None:
                return HeldPages(chain, (), None)

            def held(keys: Sequence[bytes]) -> int:
                leases.append(session.held(keys, self.namespace))
                return leases[-1].prefix_len // session.page_size

            parts.extend((leases.pop(), strand) for strand in strands_of(chain, held))
            life = self._link.life
        if life is None:
            leases += [lease for lease, _ in parts]
            parts = []
        # The others hold nothing that was asked for.
        self._link.left(leases)
        found = HeldPages(chain, tuple(parts), life)
        self.counts["found"] += found.n_pages
        return found

    def leave(self, held: HeldPages) -> None:
        """They are not needed any more."""
        self._link.left([lease for lease, _ in held.parts])

    def is_held(self, held: HeldPages) -> bool:
        """Whether they are, as far as is known without asking."""
        return bool(held.parts) and held.life is not None and held.life == self._link.life

    def load_held(self, held: HeldPages, blocks: Sequence[int]) -> int:
        """As ``load``, of the first of these pages; they are left then."""
        orders: list[tuple[PendingCopy, int]] = []
        try:
            with self._link.asked() as session:
                if session is None:
                    return 0
                for lease, strand in held.parts:
                    part = blocks[strand.first - held.chain.first : strand.end - held.chain.first]
                    if part:
                        order = self._load_ordered(session, lease, strand, part)
                        orders.append((order, len(part)))
            return self._loaded(orders)
        finally:
            self._link.left([lease for lease, _ in held.parts])

    def load(self, chain: PageChain, blocks: Sequence[int]) -> int:
        """Fill SGLang's pages; how many are right, from the first one on. The others are not.

        Args:
            chain: of them.
            blocks: their numbers in the host pool.
        """
        leases: list[SyncLease] = []
        orders: list[tuple[PendingCopy, int]] = []
        try:
            with self._link.asked() as session:
                if session is None:
                    return 0
                self._begin_loads(session, chain, blocks, leases, orders)
            return self._loaded(orders)
        finally:
            self._link.left(leases)

    def save(self, chain: PageChain, blocks: Sequence[int]) -> bool:
        """Have the node keep these pages of SGLang's; whether it has all of them.

        Args:
            chain: of them.
            blocks: their numbers in the host pool.
        """
        lease: SyncLease | None = None
        order: PendingCopy | None = None
        with self._link.asked() as session:
            if session is None:
                return False
            root = self._root_for(session, chain)
            lease = session.filled(chain.keys[root:], self.namespace)
            first = root + lease.prefix_len // session.page_size
            if first < chain.first:
                # What was there a moment ago is gone: its bytes are not here to be saved.
                lease.leave()
                return False
            self.counts["there"] += first - chain.first
            if first == chain.end:
                lease.leave()
                return True
            rows = self.pages.rows(blocks[first - chain.first :], session.page_bytes)
            order = self._ordered(session, lease, rows, first - root, to_pages=True)
        if lease is None:
            return False
        if order is None:
            self._link.left((lease,))
            return False
        is_saved = self._came(order)
        self._link.left((lease,), is_saved=is_saved)
        self.counts["saved"] += chain.end - first if is_saved else 0
        return is_saved

    def clear(self) -> None:
        """What was stored before is found by nobody any more."""
        with self._link.asked() as session:
            if session is not None:
                session.node.new_epoch(self.namespace)

    def _loaded(self, orders: Sequence[tuple[PendingCopy, int]]) -> int:
        """How many pages are right of these copies, up to the first that is not."""
        n_right, is_gap = 0, False
        for order, n_pages in orders:
            is_right = self._came(order)
            is_gap = is_gap or not is_right
            n_right += 0 if is_gap else n_pages
        self.counts["loaded"] += n_right
        return n_right

    def _begin_loads(
        self,
        session: StorageSession,
        chain: PageChain,
        blocks: Sequence[int],
        leases: list[SyncLease],
        orders: list[tuple[PendingCopy, int]],
    ) -> None:
        def held(keys: Sequence[bytes]) -> int:
            lease = session.held(keys, self.namespace)
            leases.append(lease)
            return lease.prefix_len // session.page_size

        for strand in strands_of(chain, held):
            part = blocks[strand.first - chain.first : strand.end - chain.first]
            orders.append((self._load_ordered(session, leases[-1], strand, part), len(part)))

    def _load_ordered(
        self, session: StorageSession, lease: SyncLease, strand: PageStrand, blocks: Sequence[int]
    ) -> PendingCopy:
        rows = self.pages.rows(blocks, session.page_bytes)
        return self._ordered(session, lease, rows, strand.first - strand.root, to_pages=False)

    def _ordered(
        self,
        session: StorageSession,
        lease: SyncLease,
        rows: list[list[int]],
        first_page: int,
        *,
        to_pages: bool,
    ) -> PendingCopy:
        blocks = session.blocks(self.pages)
        begin = blocks.begin_save if to_pages else blocks.begin_load
        component = session.component
        # Of groups, be there one: that is how the memory was given.
        pages = lease.pages_of(component)[first_page : first_page + len(rows[0])]
        return begin(lease, {component: rows}, pages={component: pages}, first_page=first_page)

    def _root_for(self, session: StorageSession, chain: PageChain) -> int:
        """Where the strand begins that these pages go on, or are the beginning of."""
        root = 0
        while root < chain.first:
            n_pages = session.matched(chain.keys[root : chain.first], self.namespace)
            if root + n_pages == chain.first:
                return root
            root = root + n_pages if n_pages else chain.first
        return root

    def _came(self, order: PendingCopy) -> bool:
        """Whether it was made; only once none of its bytes can move any more."""
        within_s = COPY_WITHIN_S + sum(part.n_bytes for part in order.parts) / SLOW_BYTES_PER_S
        try:
            order.result(within_s)
        except KvdError as error:
            order.cancel()
            while not order.safe():
                with contextlib.suppress(KvdError):
                    order.result(SAFE_LOOK_S)
            self._link.lost(error)
            return False
        return True
