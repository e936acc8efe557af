"""What a console knows, as plain values: no screen, no socket, no clock; time comes in.

``mirror`` folds frames into sheets, ``moments`` keeps what was, ``rates`` makes series of counters.
The others turn text into values and values into text: ``filters``, ``cells``, ``commands``,
``trail``, ``export``.
"""
