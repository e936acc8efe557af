"""The simulator: real nodes in one process, under a seeded network, engines and faults.

It is deterministic: a seed and its settings are the whole story, on every machine. What is
simulated is what surrounds a node; the node itself, its protocol and its tables are the real ones.

The map of this room::

    runner            runs seeds and says what became of each
    world             one seed: storm, calm, verdict; ``profile`` is how bad it is
    agenda, network   time, and the control links
    host              a node with its transfer process, its engines and what its pages hold
    transfer_process  agents, posts under way, copies; bytes on the way, in connections of their own
    engine            sessions, jobs and their rows; ``sending``, ``receiving``: what engines do
    cluster           a recorded load over decode nodes, for ``kvd sim --trace``

What must not live here: real memory, sockets, clocks.
"""
