"""Tiers: what lies below the pool, what is written there before it leaves, and what comes back.

Pages that are about to be evicted are written to a tier (``Demoter``); which objects lie there is
known by their keys (``TierIndex``); a request whose prompt goes on there waits until it is in the
pool again (``Promotions``). Of a store that nodes share it is known what this node has written
there lately, and when what is pinned goes (``StoreWrites``). A page that moves has an owner, as
every page: a lease of its own, which stays until the storage process has said that it is done with
the page, or is reaped.

What must not live here: bytes and files (``kvd.storage``).
"""
