"""The wire: every message that leaves or enters a daemon, as unions of tagged structs.

Declarations and their bounds, and nothing that decides: no state, no socket, no clock. A field is
added at the end with a default; a type is never changed, a tag never used for something else. The
bytes of every member are written down in ``tests/wire/golden.json``.

Who speaks what:

==============  ====================================  =============================================
module          unions                                between
==============  ====================================  =============================================
``attach``      ``AttachRequest``, ``AttachReply``    an engine process and the daemon, once, with
                                                      the file descriptors of the pool
``client``      ``Request``, ``Reply``                an engine and the daemon: leases, handoffs
``peer``        ``Message``                           two daemons: Hello, Offer, Accept, Settled
``admin``       ``AdminRequest``, ``AdminReply``      an operator (``kvd`` verbs) and the daemon
``console``     frames and tables                     a console (``kvd-tui``) and the daemon
``events``      ``Event``                             the daemon and whoever follows it: log,
                                                      metrics, consoles, recordings
``snapshot``    ``Snapshot``                          in answers of ``client`` and ``admin``
==============  ====================================  =============================================

Read ``codec`` first: bytes to messages and back, and why hostile bytes never raise past it. Then
the union in question. ``bounds`` has what a field may be, ``memory`` how a pool is mapped.
"""
