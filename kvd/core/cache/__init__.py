"""What is cached and who has it: pages, the tree of prefixes, and the record that a lease is.

Here are the structures and their invariants, each for itself: nothing here knows a queue, a peer, a
clock or an effect. Who moves pages between them is ``kvd.core.leases``, what a pool has beside its
first component ``kvd.core.components``; whether an invariant holds is asked by ``kvd.core.audit``.

Read first, in this order:

- ``pages.PagePool``: the free pages of one component; one that comes back twice is found at once;
- ``radix_node.RadixNode``: one edge of the tree, with its ``lock_ref``;
- ``radix.RadixTree``: match, lock, extend, evict. ``lock_ref`` changes in this file alone: in
  ``lock``, ``relock`` and ``unlock``; a new root begins with 1, a split gives it to both halves, a
  repair adds what lacks;
- ``eviction``: which unlocked node goes first, one class per policy;
- ``quotas``: who goes before or after that for the sake of a namespace; ``quota_order`` does it;
- ``namespaces``: what the tree calls a namespace in an epoch, which nobody outside can name;
- ``lease_record.LeaseRecord``: what one owner has of the pool; ``lease``: what it was asked for;
  ``lease_state``: running, retracted, and between.

``moved_pages`` is how a sweep that looks at a living node learns what moved meanwhile.
"""
