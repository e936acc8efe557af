"""Bare NIXL between two regions of one process: python -m tests.gpu.raw MIB ROUNDS.

What there is to compare kvd's handoffs with: the same agents and descriptors, without a daemon.
Prints a line of JSON: GB/s by way, the best of the rounds.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvd.device.cuda import MemorySide, Runtime
from kvd.device.cuda_library import load
from kvd.transfer.mapping import map_scratch
from kvd.transfer.metadata import HOST, VERSION, MemoryKind, MemorySite, Metadata
from kvd.transfer.nixl import Binding, MemorySpan, ReceivingAgent, SendingAgent, Sides
from kvd.transfer.sending_agents import SCRATCH_BYTES

if TYPE_CHECKING:
    from kvd.transfer.descriptors import Words

DESCRIPTOR_BYTES = 512 * 2**10
HANDLE_ROWS = 32
IN_FLIGHT = 4


class Memory(NamedTuple):
    """A region, and where it lies."""

    address: int
    place: MemorySite


def rows(memory: Memory, size: int) -> Words:
    starts = np.arange(0, size, DESCRIPTOR_BYTES, dtype=np.uint64)
    found = np.empty((starts.size, 3), np.uint64)
    found[:, 0] = starts + np.uint64(memory.address)
    found[:, 1] = DESCRIPTOR_BYTES
    found[:, 2] = memory.place.device
    return found


def moved_s(sender: SendingAgent, source: Memory, onto: Memory, size: int) -> float:
    """How long it takes to write all of one over the other."""
    sides = Sides(source.place.kind, onto.place.kind)
    at, to = rows(source, size), rows(onto, size)
    flying: list[int] = []
    began_s = time.perf_counter()
    for low in range(0, len(at), HANDLE_ROWS):
        while len(flying) >= IN_FLIGHT:
            flying = [one for one in flying if not sender.step(one)]
        cut = slice(low, low + HANDLE_ROWS)
        flying.append(sender.post(at[cut], to[cut], sides))
    while flying:
        flying = [one for one in flying if not sender.step(one)]
    return time.perf_counter() - began_s


def main(size: int, rounds: int) -> None:
    runtime = load()
    assert isinstance(runtime, Runtime), runtime.sentence
    first, second = (runtime.allocate(0, size) for _ in range(2))
    place = MemorySite(MemoryKind.VRAM, 0) if runtime.side(first) is MemorySide.DEVICE else HOST
    here, there = Memory(first, place), Memory(second, place)
    host = Memory(map_scratch(size), HOST)
    spans = [MemorySpan(one.address, size, one.place) for one in (here, there, host)]
    scratch = map_scratch(SCRATCH_BYTES)
    binding = Binding(int(runtime.driver_version().partition(".")[0]))
    spans.append(MemorySpan(scratch, SCRATCH_BYTES))
    receiver = ReceivingAgent(binding, "raw", spans)
    told = Metadata(VERSION, "raw", receiver.blob, scratch, SCRATCH_BYTES, ())
    sender = SendingAgent(binding, "raw-tx", spans=spans, peer=told)
    ways = {
        "GPU to GPU": (here, there),
        "GPU to DRAM": (here, host),
        "DRAM to GPU": (host, there),
    }
    best = {
        name: size / 1e9 / min(moved_s(sender, *way, size) for _ in range(rounds))
        for name, way in ways.items()
    }
    sys.stdout.write(json.dumps(best) + "\n")
    sender.destroy()


if __name__ == "__main__":
    main(int(sys.argv[1]) * 2**20, int(sys.argv[2]))
