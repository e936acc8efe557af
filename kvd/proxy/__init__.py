"""A reverse proxy for engines that prefill and engines that decode: ``kvd proxy``.

It speaks the HTTP API of OpenAI to clients and to engines. The map of this room::

    engines   where each is, whether it answers, and to which one a request goes
    bodies    what is said to a prefill engine, to a decode engine, and to a client that errs
    lookup    the tokens of a prompt, and how many of them each node has, asked or guessed
    relay     one request: prefill, then decode, streamed
    server    the HTTP side of it, health and metrics

What must not live here: how an engine moves KV (``kvd.connectors``). The proxy hands on what the
prefill engine says; engines and connectors of others work behind it as well.
"""
