"""Inspect: what a node is like now, for people and programs. Everything here reads.

What lives here: the one description of state (fields, units, how each is read), the snapshot of
``kvd status``, the sentences of ``kvd why``, where every page is, and what the other end of a
handoff says of it. What must not: a change of state, a rule and whether it holds (``core.audit``),
how a table is drawn or kept up to date (``kvd.console``).

Read first, in this order:

- ``view.NodeView``: the parts of a node that may be read
- ``schema.StateField``, ``LEASE``: a field said once, for the snapshot, the tables and ``why``
- ``snapshot.snapshot``: everything at one moment; metrics are gauges of it
- ``page_states.places``: who has which pages: the audit's rules and the snapshot ask it. The page
  map of a console has a walk of its own, in slices: ``kvd.console.survey``
- ``why.because``: who holds it, why, since when; ``words`` has the states and what each waits for

To add a field of a lease: see ``schema``. To add an operator's verb: ``core.operators``.
"""
