"""Inspect: what a node is like now, for people and programs. Everything here reads.

What lives here: the one description of state (fields, units, how each is read), the snapshot of
``kvd status``, the sentences of ``kvd why``, where every page is, and what the other end of a
handoff says of it. What must not: a change of state, a rule and whether it holds (``core.audit``),
how a table is drawn or kept up to date (``kvd.console``).

Read first, in this order:

- ``view.NodeView``: the parts of a node that may be read
- ``schema.StateTable``: every field of one kind of thing, said once for the snapshot, the tables
  of consoles and ``why``; they are ``LEASE``, ``ROOM``, ``PEER``, ``CLIENT``, ``POOL`` and
  ``WAITING``. ``rows`` has what a row is made of where it is no object of the node
- ``snapshot.snapshot``: everything at one moment; metrics are gauges of it
- ``page_states.PoolPlaces``: who has which pages of one pool, of whatever component: the audit, the
  snapshot and the page map ask it
- ``why.because``: who holds it, why, since when; ``words`` has the states and what each waits for

To add a field of anything: see ``schema``. To add an operator's verb: ``core.operators``.
"""
