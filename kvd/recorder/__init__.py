"""The flight recorder: the inputs of the last minutes, and the state of the node before them.

The map of this room::

    input_records  one input as bytes, and a mark of the state that it led to
    record_layout  how those lie in the ring
    ring           the memory that the daemon writes and the recorder process reads
    kept_records   what lies in the ring, counted without the node
    process        the recorder process; ``orders`` is what it hears and says
    shadow_node    the node as it was where the ring begins, and the file both make together
    recording      that file
    player, replay a recording stepped again, and whether it comes out the same

What must not live here: the daemon's side of it (``kvd.daemon.recording``), how a node becomes
bytes (``kvd.core.replay.freeze``).
"""
