"""``kvd-tui``, the console: ``model`` is pure, ``link`` asks the daemon, ``app`` shows it."""
