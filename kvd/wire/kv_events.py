"""What routers read: batches of KV events as vLLM publishes them, since its version 0.32.

    PUB      topic ``kv@NODE@MODEL``, number (8 bytes, big endian), batch
    replay   asked by ``"", number``; answered by ``"", topic, number, batch`` for each from there
             on, and ``"", "", -1, ""`` at the end

A batch is ``[time, events, data_parallel_rank]`` in msgpack. An event is a map; its ``type`` says
which it is. Consumers drop a whole batch for one event that they do not know, so there are three.
"""

from __future__ import annotations

from typing import Final

import msgspec

NUMBER_BYTES: Final = 8
END: Final = (b"", b"", b"\xff" * NUMBER_BYTES, b"")
"""Behind the last batch of a replay."""


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Blocks that follow each other; the fields without a default are always there."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    """One for each block, at the beginning of a prompt with a salt."""


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Blocks that are not in that medium any more."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, frozen=True, tag_field="type"):
    """Nothing that was stored before is known any more."""


RoutedEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Under one number."""

    ts: float
    events: list[RoutedEvent]
    data_parallel_rank: int | None = None


_ENCODER: Final = msgspec.msgpack.Encoder()


def encode(events: list[RoutedEvent], at_s: float) -> bytes:
    """A batch; ``at_s`` in seconds since 1970."""
    return _ENCODER.encode(KvEventBatch(at_s, events, 0))


def topic_of(node: str, model: str) -> bytes:
    """What is before each batch: three parts, of which no other has an ``@``."""
    return f"kv@{node}@{model}".encode()
