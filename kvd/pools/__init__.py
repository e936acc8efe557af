"""The memory of a pool: found where the daemon before left it, or made, and kept while none runs.

The map of this room::

    build        from the specification of a pool to its regions and what engines are told of them
    memory       ``open_memory``: found, or made; all of it or nothing
    location     where ``pool.backing`` and ``pool.directory`` put it
    kept_memory  what keeps memory while no daemon runs: ``file_memory`` or ``memfd_memory``
    arena        one piece of host memory that other processes map
    host_memory, mounts   how much there is, and on which file system

What must not live here: what pages hold, who has them, the transfer process.
"""
