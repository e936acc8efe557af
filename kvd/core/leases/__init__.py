"""Leases: who gets pages, in which order, and every way in which they are given back.

A lease begins in the admission queue, commits, extends and slides while it runs, may be retracted
and resumed, and ends when its last holder lets go. All of that moves pages and locks through the
parts of one lease table; nothing else does. What the structures are is ``kvd.core.cache``; how a
prompt comes from another node is ``kvd.core.handoff``, which asks for leases like an engine.

Read first, in this order:

- ``leased_pool.LeasedPool``: what all of these move; ``lease_table.LeaseTable``: which part may
  call which;
- ``grants.Grants``: a lock and pages, all or nothing, out of ``page_supply`` and ``evictor``;
  ``commits.Commits``: held pages become cached, as far as an engine says that it is (``written``);
- ``holders.Holders``: the last that lets go ends a lease; ``lease_ends.LeaseEnds``: what goes then,
  or stays in quarantine; ``giving_way`` goes before its time, ``lent_pages`` go back to an arena;
- ``admission.Admission``: the one queue in front of it; ``promises.Promises``: pages that a lease
  is sure of and has not taken;
- ``session_table.SessionTable``: which engines there are; ``sessions.Sessions``: what ends with
  one; ``owners.Owners``: whose a lease is;
- ``retraction.Retractor``: out of the pool and back, in the steps of ``retracted``; its bytes are
  in ``saved_area``, and ``copies`` are the copies that move them;
- ``fetch.Fetcher``: pages into a device buffer; ``receive_tier`` is what a receive may ask of that.

``epochs.Epochs`` says in which generation a base of namespaces is; ``kept_answers.KeptAnswers``
answers when that is on disk.
Where a pool outlives its process: ``journal_notes`` is what is written down, ``former_leases`` what
the next process makes of it. ``lease_events`` only tells.
"""
