"""kvd, the KV transfer daemon.

Each package is a room with a map in its docstring; ``docs/contributing.md`` has them all. Beside
them: ``types`` (ids and tokens as bytes) and ``errors`` (codes and refusals), which everything may
import; ``places`` and ``sockets`` (where daemons listen), ``curve`` (keys), ``text`` (figures
for people), ``filters`` (conditions on rows and events), ``trace`` (recorded loads).
"""

__version__ = "0.1.0"
