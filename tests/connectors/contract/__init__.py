"""The contract of connectors: its cases as data, and every connector through an adapter.

``cases``: the rows of ``docs/concepts/contract.md``. ``engine``: what an adapter says of a
connector, and of the engine that it plays. ``of_NAME``: the adapters. A new connector gets one, and
a line in ``engine.ADAPTERS``. ``handoffs`` and ``of_NAME_pair`` are the same for connectors that
hand prompts over between two nodes.
"""
