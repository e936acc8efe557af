"""What must be true between two steps, in words for every violation: I1 to I8 of the design.

Run after every step in tests and by ``kvd audit``. The cost grows with the pool, so the hot path
never calls it.

- I1 null + free + held + cached + quarantined = total; each page in exactly one of them
- I2 ``lock_ref`` of a node = leases anchored in its subtree; parent >= child; never below zero
- I3 evictable pages = the pages of the nodes with ``lock_ref`` 0
- I4 every edge and every ``decode_prefix_len`` is whole pages
- I5 the prefill cursor never shrinks past what was posted; posts stay inside the delta
- I6 nothing is outstanding for a part that is settled; no quarantined page in another lease
- I7 every quarantined lease names the incarnation that may still write
- I8 event numbers are contiguous (the outbox numbers them; the shell checks on the way out)
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from kvd.core.tables import Prefill
from kvd.types import ID_BYTES

if TYPE_CHECKING:
    from kvd.core.lease import Lease
    from kvd.core.node import Node
    from kvd.core.parts import PrefillPart


def violations(node: Node) -> list[str]:
    """Every violation found, empty when all is well."""
    found = _pages(node) + _locks(node) + node.leases.tree.check()
    for lease in node.leases.leases.values():
        found += _lease(node, lease)
    for part in [*node.prefiller.by_room.values(), *node.prefiller.last_word.settled.values()]:
        found += _prefill(node, part)
    return found


def _pages(node: Node) -> list[str]:
    """I1: the places where pages are, laid side by side, tile the pool."""
    table = node.leases
    places = [("free", table.pool.free_ids())]
    places += [(f"tree node {one.id}", one.pages) for one in table.tree.nodes()]
    places += [(f"lease {one.id}", one.held) for one in table.leases.values()]
    ids = np.frombuffer(b"".join(pages for _, pages in places), dtype="<i4")
    total = table.pool.total_pages
    if ids.size == total - 1 and np.array_equal(np.sort(ids), np.arange(1, total)):
        return []
    found = [
        f"I1: null 1 + free {table.pool.free_pages} + cached {table.tree.cached_pages} + held and "
        f"quarantined {sum(one.held_pages for one in table.leases.values())} is not {total}"
    ]
    seen: dict[int, str] = {}
    for name, pages in places:
        for page in np.frombuffer(pages, dtype="<i4").tolist():
            if page in seen:
                found.append(f"I1: page {page} is in {seen[page]} and in {name}")
            seen[page] = name
    missing = sorted(set(range(1, total)) - seen.keys())
    if missing:
        found.append(f"I1: {len(missing)} pages are nowhere, the first is {missing[0]}")
    return found


def _locks(node: Node) -> list[str]:
    """I2: lock_ref is the length of the list of holders, at every node."""
    expected: Counter[int] = Counter()
    for lease in node.leases.leases.values():
        step = lease.anchor
        while step is not None:
            expected[step.id] += 1
            step = step.parent
    return [
        f"I2: node {one.id} has lock_ref {one.lock_ref}, {expected[one.id]} leases cross it"
        for one in node.leases.tree.nodes()
        if one.lock_ref != expected[one.id]
    ]


def _lease(node: Node, lease: Lease) -> list[str]:
    size = node.leases.page_size
    found = []
    if lease.quarantine is not None:
        if not lease.quarantine.incarnation:
            found.append(f"I7: quarantined lease {lease.id} names no incarnation")
        if lease.anchor is not None or lease.owned:
            found.append(f"I6: quarantined lease {lease.id} still locks a prefix")
    elif lease.anchor is None:
        found.append(f"I2: lease {lease.id} is neither locked nor quarantined")
    elif lease.anchor.end_tokens != lease.owned * size:
        found.append(
            f"I4: lease {lease.id} owns from page {lease.owned}, its lock ends at token "
            f"{lease.anchor.end_tokens}"
        )
    elif node.leases.tree.path_pages(lease.anchor) != lease.row[: lease.owned * ID_BYTES]:
        found.append(f"I1: the row of lease {lease.id} is not the tree's path that it locks")
    if lease.reads < 0 or (lease.deferred and not lease.reads):
        found.append(f"I1: lease {lease.id} keeps replaced pages that no post reads")
    return found


def _prefill(node: Node, part: PrefillPart) -> list[str]:
    found = []
    if not part.decode_prefix_len <= part.posted_tokens <= part.prompt_tokens and part.offer:
        found.append(
            f"I5: send {part.id} posted to {part.posted_tokens}, outside "
            f"[{part.decode_prefix_len}, {part.prompt_tokens}]"
        )
    if part.decode_prefix_len % node.leases.page_size and part.state is not Prefill.SETTLED:
        found.append(f"I4: send {part.id} begins at token {part.decode_prefix_len}")
    if part.state is Prefill.SETTLED and part.outstanding:
        found.append(f"I6: send {part.id} is settled with posts {sorted(part.outstanding)}")
    return found
