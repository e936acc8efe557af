"""The transfer process: the only one that knows NIXL, and the daemon's handle on it.

The map of this room. In the daemon::

    orders       what is ordered and what is reported, and its frames; nearly all of it is
                 declared in the core
    child        a process that is born, and told later what it is
    process      spawn, orders out, reports in, reap
    mapping      proof that the memory map of a dead process is gone

In the transfer process::

    worker          the loop
    sending_agents  the agents towards peers, from ``LoadAgent`` to ``AgentDropped``
    post_queue      the posts through one agent: their turns, their progress
    event_waits     posts that wait for a CUDA event
    plans           from a post to descriptors; ``page_split``, ``window_layout``, ``staging``
    sums            page sums of what is sent and of what has arrived; ``assembly`` reads pages
    core_waits      whether a thread finds a core when it wants one; storage asks it too
    paths           how bytes of a device are seen to travel
    copies          to the saved area, to the buffer, and back
    device_streams  the same by copy engines, of devices; what is summed of them
    quiescence      when late bytes have come to rest; ``streams`` looks at the sockets
    mapping, devices, metadata   regions, and what peers are told of them
    nixl            the binding, and nothing else

What must not live here: why anything is moved. Nothing but ``worker`` and what it imports may load
NIXL in a daemon (``kvd doctor`` and ``kvd.bench.raw_nixl`` bind it in processes of their own), and
nothing here may wait in the daemon's loop.
"""
