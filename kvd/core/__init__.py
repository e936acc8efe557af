"""The pure node: one input in, effects and events out. No I/O, no clock, no thread, nothing random.

The shell (``kvd.daemon``, ``kvd.transfer``) feeds inputs and carries effects out; the simulator and
a replay do the same without a network. Nothing here imports them.

Read first, in this order: ``inputs`` (what can happen), ``effects`` (what is to be done about it),
``node_parts`` (what a node is made of), ``node.NodeState.step`` (the only mutator), then
``engines`` and ``operators`` (what each request does), and ``settings`` (the figures it decides
by). Then the rooms, each of which knows only those above it:

- ``layout``: what a page is;
- ``cache``: pages, the tree of prefixes, what a lease is;
- ``components``: what a sequence owns beside its first component;
- ``leases``: everything that moves a page or a lock, and the queue in front of it;
- ``kv_events``: what routers are told of what is cached;
- ``tiers``: what lies below the pool;
- ``peers``: which other nodes there are, and whether they live;
- ``handoff``: a prompt's KV from one node to another;
- ``inspect``: the state of a node in words and tables;
- ``audit``: what must be true of it, asked all the time;
- ``replay``: a node as bytes.

``recorded`` is what the node knows of its flight recorder, ``outbox`` where a step collects what it
says, ``rest`` when a tick has something to do.
"""
