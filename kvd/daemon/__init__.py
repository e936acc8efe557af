"""The shell around the node: it opens sockets and memory, and performs what a step wants done.

The map of this room, in the order in which a daemon comes up::

    serve                 one daemon from start to exit status; signals
    launch                the lock, the memory, the first transfer process
    warm_restart          the memory of the pool; what the daemon before left there, taken over as
                          far as it is proven
    app                   the composition root: builds every part, wires it, takes it down
    beats                 when the loop beats, and how long it may sleep
    reactor               inputs to the node, effects to the world, events to the bus
    transfer_supervisor   the life of the transfer process: orders out, reports in, restart
    attach, sessions      engines: who gets the pool's memory, and when its processes are gone
    clients, admins, peerlinks     the three ZMTP sockets
    journalist, recording          what is written down for the next daemon, and for replay
    systemd, watchdog              systemd: what it is told, what it hands over

What must not live here: any decision about pages, leases, handoffs or peers. That is the node's
(``kvd.core``); what it decides comes here as an effect.
"""
