"""The journal: what a pool holds, noted beside it for the process that comes after this one.

A table of fixed size over any writable buffer, written in place: one word and one row for each
page, one slot for each lease and each engine. No log, so nothing grows and nothing is compacted,
and what is read depends on the last state alone.

What lives here: its layout, who writes it (``writer``), who reads it (``reader``). What must not:
files and mappings (the pools), clocks, processes, the bytes of pages (the transfer process).

A killed process leaves behind exactly the stores that it had done, in their order: the memory
outlives it. So the order of stores is the whole protocol. Every store that decides anything is one
aligned word of 8 bytes, and a page's word is the last one written when it becomes cached, and the
first one when it ends.

    word of a page   0                      nobody's
                     00 | lease | slot      a lease's own; slot 0xFFFF: of a lease without a slot
                     01 | serial            in the tree, its sum is not known yet
                     1  | check             in the tree, and ``check`` proves its row

A ``serial`` is given once: each caching of a page has its own, and names that of the page before
it, so a row never joins a sequence that it was not cached in. ``check`` covers the page's number,
its row (place, both serials, sum, tokens) and the name of its namespace.

Invariant: a page whose check is good holds, since before the check was stored, the KV of its path,
unless somebody wrote where they had no lease.
"""
