"""What a console knows, as plain values: no screen, no socket, no clock; time comes in.

Read first, in order: ``mirror`` folds frames in and says what to ask; ``tables`` are the windows of
tables and the page maps as they came, filtered and sorted here until the daemon answers;
``snapshots`` keep what was, for a frozen screen; ``rates`` make figures per second of counters;
``columns`` name the cells of a row and add columns that are made here.

Then what a page reads: ``handoffs``, ``peers``, ``clients``, ``event_words`` (an event as a
sentence), ``event_log`` (many of them). ``cells`` make text of figures. ``commands``
is the grammar of what an operator types.

What must not live here: Textual, sockets, files.
"""
