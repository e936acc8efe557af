"""Real daemons on this machine, as child processes: for measurements, the demo and the tests.

What lives here: how ``kvd serve`` is started, found ready, asked and stopped, and where: on this
host or in a network namespace. What must not: what is measured, shown or asserted. Read
``DaemonProcess`` first, then ``two_daemons`` (a prefill and a decode node that know each other),
``star_of_daemons`` and, for two hosts on one, ``netns.two_namespaces``. ``child`` is any other
process of a measurement, which obeys one command at a time.
"""
