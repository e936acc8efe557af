"""ZMTP 3.1 on the event loop: sockets that talk to libzmq, bounded by construction.

The map of this room, from the wire to the loop::

    frames      how ZMTP spells greetings, frames, commands and properties
    events      what a protocol machine says: HandshakeDone, a message, ConnectionClosed
    mechanism   who is there, and what each frame is wrapped in; ``curve`` is the one with keys
    protocol    the machine of one connection: bytes in, events out; frames in, bytes out
    bounds      every limit, with what it is for
    turns       what all connections of one loop share: nobody waits for a flood
    connection  a machine on a socket
    acceptor    connections as they come to a listening socket
    shares      whose connections and bytes they are, and who pays when it is too much
    listener    takes connections; keeps their number and their weight in bounds
    dialer      one connection that is made again for ever

Everything above ``turns`` does no input or output and knows no clock. What comes from the
other side never raises: it is a message, or the connection ends with a ``ConnectionFault``. Peers
are sockets of libzmq, 3.0 or later; to them a listener is a ROUTER,
or a PUB where its owner says so, and a dialer a DEALER.

What must not live here: what messages mean, who may say what, codecs.
"""
