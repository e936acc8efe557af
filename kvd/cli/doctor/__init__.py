"""``kvd doctor``: is this host fit for kvd?

Read first: ``command`` (the table of checks, and the verb), ``finding`` (what a check is given and
what it says), then the checks by what they look at: ``host``, ``memory``, ``service``, ``peers``,
``transport``, ``tiers``.

What must not be here: anything that changes the host or needs a daemon.
"""
