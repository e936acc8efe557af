"""A batch is one of vLLM's, by vLLM's own structs; ``KVD_VLLM_PYTHON`` names an interpreter.

Read by them and written again it says the same, with the same fields in each event.
"""

from __future__ import annotations

import os
import subprocess

import msgspec
import pytest

from kvd.wire.kv_events import END, AllBlocksCleared, BlockRemoved, BlockStored, encode

PYTHON = os.environ.get("KVD_VLLM_PYTHON", "")
AGAIN = """
import sys, msgspec
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
batch = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=KVEventBatch)
sys.stdout.buffer.write(ZmqEventPublisher.END_SEQ + msgspec.msgpack.encode(batch))
"""
SALTED = BlockStored(
    block_hashes=[2**63 + 5, 2**40],
    parent_block_hash=None,
    token_ids=list(range(32)),
    block_size=16,
    lora_id=None,
    medium="CPU",
    lora_name="pirate",
    extra_keys=[["salt"], None],
)
NEXT = BlockStored(
    block_hashes=[2**50],
    parent_block_hash=2**40,
    token_ids=list(range(16)),
    block_size=16,
    lora_id=None,
    medium="STORAGE",
    lora_name=None,
)
REMOVED = BlockRemoved(block_hashes=[2**40], medium="CPU")


def test_fields_that_vllm_always_has_are_there_and_no_others():
    stamp, events, rank = msgspec.msgpack.decode(encode([NEXT, REMOVED, AllBlocksCleared()], 1.5))
    assert (stamp, rank) == (1.5, 0)
    always = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id")
    assert tuple(events[0]) == (*always, "medium", "lora_name")
    assert tuple(events[1]) == ("type", "block_hashes", "medium")
    assert events[2] == {"type": "AllBlocksCleared"}


@pytest.mark.skipif(not PYTHON, reason="KVD_VLLM_PYTHON is not set")
def test_vllm_reads_a_batch_and_would_have_written_the_same():
    batch = encode([AllBlocksCleared(), SALTED, NEXT, REMOVED], 1.5)
    done = subprocess.run(
        [PYTHON, "-c", AGAIN], input=batch, capture_output=True, timeout=300, check=True
    )
    end, again = done.stdout[:8], done.stdout[8:]
    assert end == END[2]
    assert msgspec.msgpack.decode(again) == msgspec.msgpack.decode(batch)
