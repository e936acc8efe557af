"""``kvd-tui``, the console: who holds which page, why, and since when.

What the daemon tells goes one way: ``link`` asks for frames, ``model.mirror`` folds them into
tables, maps and logs, a page of ``screens`` paints them with its ``widgets``, by lines that
``draw`` makes. What an operator does goes the other way: bindings of ``app`` and of the pages, and
``model.commands``, name an action; what asks the daemon is in ``actions``, and what changes the
node is rehearsed and confirmed first.

Read first, in order: ``app`` (what is on the screen, the clock, the keys), ``link`` (asking),
``model.mirror`` (what came), ``screens.page`` (what a page is, and its keys).
``cli`` has the options and ``--once``.

What must not live here: anything that only a daemon may know. The console sees the wire
(``kvd.wire``), the filter language (``kvd.filters``) and nothing of the node.
"""
