"""Replay: a node as bytes and back, so that a recording goes on exactly as the node would have.

What lives here: the form of an object graph, its writer and its reader, and the hash of a state.
What must not: inputs and files (``kvd.recorder``). It ranks above the node, which it may name.

Read first, in this order:

- ``graph``: what a node may be made of; names of classes are the names in recordings
- ``freeze.freeze``, ``freeze.state_hash``: a node as one canonical form
- ``thaw.thaw``: the opposite, of bytes that nobody vouches for
"""
