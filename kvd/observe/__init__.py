"""Observe: how a daemon is watched from outside: events, log, metrics, HTTP pages.

What lives here: the fan-out of events, one line of log per event, counters that events add to, and
the Prometheus page. What must not: state of the node (``core.inspect`` has the snapshot that gauges
are made of), tables of consoles (``kvd.console``).

Read first, in this order:

- ``bus.Bus``: one stream of events to whoever takes them, and a ring for those who ask later
- ``metrics.Metrics``: what is counted, by events and requests
- ``exposition.Exposition``: counters, and gauges of a snapshot, under their public names
- ``log.EventLog``: the only place that writes a log
- ``http.HttpServer``: five pages, read only
"""
