"""KV events: what routers are told of which page of which prompt is cached here, and where.

Routers call a page a *block*. It is theirs by a name of 64 bits, chained by that of the block
before it (``block_names``). ``announcer.BlockAnnouncer`` says which blocks are stored and removed,
as the tree grows and shrinks, and says all of them once more when somebody has missed some.

What must not live here: numbers of batches, buffers, sockets (``kvd.daemon.kv_events``).
"""
