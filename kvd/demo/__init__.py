"""``kvd demo``: the main job end to end on one machine, with real Hugging Face architectures.

What lives here: the demo (``command``, ``runner`` and ``report``, on the ``processes`` it starts),
its engines (``engine``, with ``leased``, ``own_blocks`` and ``cache``), and what is worked out
without them (``layout``, ``conversation``), so that their figures can be held against it. What must
not: anything that the daemon or the client library needs. As an engine's author read
``engine.Engine`` first, then ``leased`` and ``cache``; for a KV cache of its own, ``own_blocks``.
"""
