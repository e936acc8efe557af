"""Console: what ``kvd-tui`` sees of a node, as tables cut to a screen and paid from a budget.

What lives here: the server of frames, which rows each table has, the page map, and what is
remembered from look to look. What must not: a word about a thing that ``kvd status`` or
``kvd why`` says too (``core.inspect``), sockets (``kvd.daemon``), how anything is painted
(``tui``).

Read first, in this order:

- ``server.ConsoleServer``: feeds, frames and the budget; ``VIEWS`` are all tables
- ``view.View``: a table cut to a window; ``tables`` has those whose columns are declared in
  ``core.inspect.schema`` with the snapshot, ``tree`` those of the nodes of the tree
- ``context.Context``: what a table may read: the node, ``history``, what the shell knows
- ``concerns``: what an operator should look at, and why
- the page map: ``survey.Survey`` walks free lists, tree and leases in slices and writes who has
  each page into ``page_owners.PageOwners``; ``page_map`` cuts cells out of it for a query, through
  one of ``page_map_modes.MODES`` (state, owner, age, hits, locks, tier)
"""
