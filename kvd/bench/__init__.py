"""``kvd bench``: what operators measure on hosts of their own, beside a reference of the same run.

What lives here: ``stream`` (goodput of handoffs, beside raw NIXL and plain copies), ``control``
(round trips of the verbs, beside a bare ``echo``), ``restart`` and ``footprint``; calls in small
``rounds``, and ``counts`` of what they take; ``report`` makes a command of any measurement, and
prints and writes down what it found. What must not: what only proves a claim of ours, which is in
``benchmarks`` at the top of the repository, and how daemons are started (``kvd.harness``).
"""
