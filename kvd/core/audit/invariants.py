"""What must be true between two steps, in words for every violation: I1 to I10.

Everything at once: run after every step in tests and by ``kvd audit``. The cost grows with the
pool, so the hot path never calls it; the standing audit (``audit``) asks the same rules piece by
piece.

- I1 null + free + held + cached + quarantined = total; each page in exactly one of them
- I1 of the saved area: null + free + saved = total; each page in exactly one of them
- I2 ``lock_ref`` of a node = leases anchored in its subtree; parent >= child; never below zero
- I3 evictable pages = the pages of the nodes with ``lock_ref`` 0
- I4 every edge and every ``decode_prefix_len`` is whole pages
- I5 the prefill cursor never shrinks past what was posted; posts stay inside the delta
- I6 nothing is outstanding for a part that is settled; no quarantined page in another lease
- I7 every quarantined lease names the incarnation that may still write
- I8 event numbers are contiguous (the outbox numbers them; the shell checks on the way out)
- I9 what is held is held for somebody: see ``rules``
- I10 promised pages <= free + evictable pages, of each component: see ``leases.promises``

I1 to I4 and I9 hold of every component with pages of its own: see ``component_rules``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.audit.backrefs import Backrefs
from kvd.core.audit.component_rules import component_faults
from kvd.core.audit.rules import (
    lease_faults,
    lock_faults,
    post_faults,
    promise_faults,
    queue_faults,
    quota_faults,
    ready_faults,
    receive_faults,
    register_faults,
    saved_faults,
    send_faults,
    tile_faults,
    tree_faults,
)
from kvd.core.audit.tier_rules import tier_faults
from kvd.core.inspect.page_states import pools_of

if TYPE_CHECKING:
    from kvd.core.audit.rules import Fault
    from kvd.core.inspect.view import NodeView


def violations(node: NodeView) -> list[str]:
    """Every violation found, one sentence each; empty when all is well."""
    return [fault.sentence for fault in faults(node)]


def faults(node: NodeView) -> list[Fault]:
    """Every rule that does not hold now."""
    refs = Backrefs(node)
    tree, decoder, prefiller = node.leases.tree, node.decoder, node.prefiller
    found = [fault for pool in pools_of(node.leases) for fault in tile_faults(pool)]
    found += saved_faults(node.leases) + tree_faults(tree) + promise_faults(node.leases)
    found += quota_faults(node.leases)
    for edge in (*tree.roots.values(), *tree.nodes()):
        found += lock_faults(edge, refs)
    for lease in node.leases.leases.values():
        found += lease_faults(node, lease, refs)
    for receive in decoder.open.parts.values():
        found += receive_faults(node, receive, refs)
    for lease_id, attempt in decoder.open.ready.items():
        found += ready_faults(node.leases, lease_id, attempt)
    for send in prefiller.known():
        found += send_faults(node, send, refs)
    for post, send in prefiller.posts.parts.items():
        found += post_faults(node.prefiller, post, send)
    found += queue_faults(node, refs)
    found += register_faults(node)
    found += tier_faults(node)
    found += component_faults(node, refs)
    return found
