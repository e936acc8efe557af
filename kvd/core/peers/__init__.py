"""Other daemons: who they are, whether they live, and whether their pages fit ours.

Read in this order:

1. ``peer``            ``Peer``: what is known of one daemon; ``Life``, ``Agent``, ``PeerDrain``
2. ``registry``        ``Peers``: all of them; what a Hello proves, what silence only suggests
3. ``hello``           what a Hello must satisfy, and who speaks for whom
4. ``claims``          ``NameClaims``: who has a name that two processes want, or one after another
5. ``agents``          ``Agents``: the sending agent towards each peer, whose end is the true abort
6. ``pulse``           ``Pulse``: pings, floors, and whose connection is whose
7. ``compatibility``   whether two pools hold the same pages, and which shard fills which

::

    Hello(incarnation, generation, layout) -> hello: may it? -> registry: who is gone by that?
                                                             -> compatibility: what fits?
                                                             -> agents: load a sending agent
    Ping -> pulse: floors, claims    silence -> registry: UP -> SUSPECT -> LOST

Two things are told apart everywhere: a *proof* that a process never writes again (a newer
incarnation, a destroyed agent), which gives pages back, and a *guess* (silence), which does not.

What must not live here: handoffs, and pages (``kvd.core.handoff``). Nothing here imports it.
"""
