"""``kvd demo``: the main job end to end on one machine, with real Hugging Face architectures.

What lives here: the demo (``command``, ``runner`` and ``report``, on the ``processes`` it starts),
its engines (``engine``, with ``leased``, ``cache`` and ``ranks``), and what is worked out without
them (``layout``, ``division``, ``conversation``), so that their figures can be held against it.
What must not: anything that the daemon or the client library needs. As an engine's author read
``engine.PrefillEngine`` and ``engine.DecodeEngine`` first, then ``leased`` and ``cache``.
"""
