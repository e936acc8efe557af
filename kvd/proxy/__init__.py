"""A reverse proxy for engines that prefill and engines that decode: ``kvd proxy``.

It speaks the HTTP API of OpenAI to clients and to engines. The map of this room::

    paths      which requests go on, and how their paths may be spelled
    headers    which headers go through, in both directions
    bodies     what is read of a client, what engines and clients are told
    limits     how long and how large anything may be
    engines    where each is, what is known of it, to which one a request goes
    lookup     the tokens of a prompt, and how many of them each node has, asked or guessed
    exchange   one request to one engine: connections, and what may go wrong
    relay      one request of a client: prefill, then decode, streamed
    metrics    what is counted, and what is read of the counts of an engine
    server     the HTTP side of it, and health

What must not live here: how an engine moves KV (``kvd.connectors``). The proxy hands on what the
prefill engine says; engines and connectors of others work behind it as well.
"""
