"""CUDA memory, and what runs on it: a pool on a device, and what engines do with one.

The map of this room::

    cuda, cuda_library, presence   the runtime by ctypes, and whether a device can be used here
    copies         scattered pieces between a device and host memory, by the copy engine
    attention      attention over the pages of a pool, by flash-attn or in torch alone
    collectives    gathers of KV over a group of ranks, in ``symmetric`` memory or plain
    sequence       which tokens of a prompt are whose, of ranks that share it
    arena          the memory that gathers use

Only the first row is the daemon's and the transfer process's; the rest is for engines, and for
``kvd demo``. What must not live here: leases, pages of a node, torch in what the daemon loads.
"""
