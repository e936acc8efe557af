"""ZMTP 3.1 on the event loop: sockets that talk to libzmq, bounded by construction.

The map of this room, from the wire to the loop::

    frames      how ZMTP spells greetings, frames, commands and properties
    events      what a protocol machine says: HandshakeDone, a message, ConnectionClosed
    mechanism   who is there, and what each frame is wrapped in: null, curve
    protocol    the machine of one connection: bytes in, events out; frames in, bytes out
    bounds      every limit, with what it is for
    write_batch what all connections of one loop share
    connection  a machine on a socket
    fair_turns  whose turn it is, so that nobody waits for a flood
    acceptor    connections as they come to a listening socket
    listener    takes connections; keeps their number and their weight in bounds
    dialer      one connection that is made again for ever

Everything above ``write_batch`` does no input or output and knows no clock. What comes from the
other side never raises: it is a message, or the connection ends with a ``ConnectionFault``. Peers
are sockets of libzmq, 3.0 or later; to them a listener is a ROUTER and a dialer a DEALER.

What must not live here: what messages mean, who may say what, codecs.
"""
