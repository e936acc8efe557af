"""The simulator: real nodes in one process, under a seeded network, engines and faults.

Nothing here opens a socket, reads a clock or touches memory. Time is a heap of what happens next
(``agenda``), so an hour of a cluster takes a minute and a seed replays exactly. ``world`` puts it
together, ``runner`` runs seeds; ``cluster`` replays a recorded load over many nodes instead.
"""
