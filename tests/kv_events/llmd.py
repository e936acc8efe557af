"""A consumer that goes by the rules of llm-d-router's subscriber, written anew from what they are.

One node, one thread: ``hear`` reads what has come. Its cool-down after a failed replay is 2 s where
the router's is 30. What it is strict about is what makes it a test:

- a topic has three parts; one event that it cannot read drops the whole batch;
- a hash is 64 bits wide as msgpack writes it, or bytes; 0 is no parent; behind an unknown parent
  an event is passed over;
- stores are counted by medium and hash: what was stored twice stays when it is removed once;
- a text in ``extra_keys`` makes a block one of its own, which no plain prompt finds;
- with replay: whatever it is sent must go on exactly at the number it has asked for; nothing at
  all is an answer to 0 only, and the next batch is its new beginning; after a failure it forgets
  the node and hears nothing until the cool-down is over.
"""

from __future__ import annotations

import time
from collections import Counter

import msgspec
import zmq

COOL_DOWN_S = 2.0
REPLAY_S = 2.0
TRIES = 3
END = b"\xff" * 8
WIDE = (0xCF, 0xD3)
"""The first byte of an unsigned and of a signed 64-bit number."""
NIL = b"\xc0"
BYTES = (0xC4, 0xC5, 0xC6)
WEIGHTS = {"gpu": 1.0, "cpu": 0.8}


class Unreadable(Exception):
    """A batch is dropped for this."""


class _Raw(msgspec.Struct, frozen=True):
    """An event as it came: hashes are judged by their bytes."""

    type: str
    block_hashes: list[msgspec.Raw] = []
    parent_block_hash: msgspec.Raw = msgspec.Raw(NIL)
    token_ids: list[int] = []
    block_size: int = 0
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[object] | None] | None = None


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[_Raw]
    data_parallel_rank: int | None = None


_DECODE = msgspec.msgpack.Decoder(_Batch).decode


def hash_of(raw: msgspec.Raw) -> int:
    said = bytes(raw)
    if said[0] in WIDE:
        return int(msgspec.msgpack.decode(said)) % 2**64
    if said[0] in BYTES:
        return int.from_bytes(msgspec.msgpack.decode(said)[-8:], "big")
    raise Unreadable(f"unsupported hash type {said[:1].hex()}")


class LlmdIndex:
    """Blocks of one node by what a prompt asks for: model, tokens from the start, and taints."""

    def __init__(self) -> None:
        self.key_of: dict[int, tuple] = {}
        """By hash, what a prompt asks for."""
        self.counts: Counter[tuple[str, int]] = Counter()
        """By medium and hash, how often it was stored."""
        self.skipped = 0

    def clear(self) -> None:
        self.key_of.clear()
        self.counts.clear()

    def apply(self, events: list[_Raw], model: str) -> None:
        for event in events:
            hashes = [hash_of(raw) for raw in event.block_hashes]
            medium = (event.medium or "gpu").lower()
            match event.type:
                case "AllBlocksCleared":
                    self.clear()
                case "BlockRemoved":
                    for one in hashes:
                        self.counts[medium, one] -= 1
                        if self.counts[medium, one] <= 0:
                            del self.counts[medium, one]
                case "BlockStored":
                    self._store(event, hashes, medium, event.lora_name or model)
                case _:
                    raise Unreadable(f"unknown event {event.type}")

    def _store(self, event: _Raw, hashes: list[int], medium: str, model: str) -> None:
        raw = event.parent_block_hash
        parent = 0 if bytes(raw) == NIL else hash_of(raw)
        extra = event.extra_keys or [None] * len(hashes)
        if len(extra) != len(hashes):
            raise Unreadable("extra keys are one for each block")
        if parent and parent not in self.key_of:
            self.skipped += 1
            return
        if not event.token_ids:
            hashes = [one for one in hashes if one in self.key_of]
        size = event.block_size
        key = self.key_of[parent] if parent else (model,)
        for at, one in enumerate(hashes):
            if event.token_ids:
                block = tuple(event.token_ids[at * size : (at + 1) * size])
                if len(block) != size:
                    raise Unreadable("token ids do not fill the blocks")
                taint = tuple(map(str, extra[at] or ()))
                key = (key, block, taint) if taint else (key, block)
                self.key_of[one] = key
            self.counts[medium, one] += 1

    def found(self, tokens: list[int], model: str, size: int) -> int:
        """Blocks of a prompt that are here, from its start."""
        there = {self.key_of[one] for _, one in self.counts}
        key: tuple = (model,)
        blocks = 0
        for start in range(0, len(tokens) - size + 1, size):
            key = (key, tuple(tokens[start : start + size]))
            if key not in there:
                break
            blocks += 1
        return blocks

    def media(self, tokens: list[int], model: str, size: int) -> set[str]:
        """Where the first block of a prompt is."""
        first = ((model,), tuple(tokens[:size]))
        return {medium for medium, one in self.counts if self.key_of[one] == first}


class LlmdSubscriber:
    """One subscription; without ``replay``, which is the router's default, numbers do not count."""

    def __init__(self, listen: str, replay: str | None) -> None:
        self.index = LlmdIndex()
        self.model = ""
        self.dropped: list[str] = []
        self.failures = 0
        self.last: int | None = None
        """The number of the last batch; None: the next one is taken for the beginning."""
        self._cool_until_s = 0.0
        self._replay = replay
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.connect(listen)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"kv@")
        if replay is not None:
            self._ask(0)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def hear(self, seconds: float) -> None:
        """What comes within so long."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            if self._sub.poll(int(left_s * 1000) + 1):
                topic, number, payload = self._sub.recv_multipart()
                self._live(topic, int.from_bytes(number, "big"), payload)

    def until(self, holds, within_s: float = 20.0) -> bool:
        """Hear until that holds, and whether it does in the end."""
        end_s = time.monotonic() + within_s
        while not holds(self) and time.monotonic() < end_s:
            self.hear(0.1)
        return bool(holds(self))

    def _live(self, topic: bytes, number: int, payload: bytes) -> None:
        if self._replay is None:
            self._apply(topic, payload)
            return
        if time.monotonic() < self._cool_until_s:
            return
        if self.last is not None and number <= self.last:
            if number == self.last:
                return
            self.index.clear()  # the publisher began anew
            self._ask(0)
        elif self.last is not None and number > self.last + 1:
            self._ask(self.last + 1)
        if time.monotonic() < self._cool_until_s:
            return
        if self.last is None or number == self.last + 1:
            self._apply(topic, payload)
            self.last = number

    def _apply(self, topic: bytes, payload: bytes) -> None:
        parts = topic.decode().split("@")
        self.model = parts[2] if len(parts) == 3 else ""
        try:
            self.index.apply(_DECODE(payload).events, self.model)
        except (Unreadable, msgspec.MsgspecError) as error:
            self.dropped.append(str(error))

    def _ask(self, number: int) -> None:
        """All batches from that one on, exactly; else the node is forgotten for a while."""
        for _ in range(TRIES):
            batches = self._batches_from(number)
            if batches is None:
                continue
            got = [at for at, _, _ in batches]
            if got == list(range(number, number + len(got))) and (got or number == 0):
                for at, topic, payload in batches:
                    self._apply(topic, payload)
                    self.last = at
                if not got:
                    self.last = None
                return
            break
        self.failures += 1
        self.index.clear()
        self.last = None
        self._cool_until_s = time.monotonic() + COOL_DOWN_S

    def _batches_from(self, number: int) -> list[tuple[int, bytes, bytes]] | None:
        dealer = self._context.socket(zmq.DEALER)
        try:
            dealer.connect(self._replay)
            dealer.send_multipart([b"", number.to_bytes(8, "big")])
            found: list[tuple[int, bytes, bytes]] = []
            while dealer.poll(int(REPLAY_S * 1000)):
                empty, topic, at, payload = dealer.recv_multipart()
                assert empty == b""
                if at == END:
                    return found
                found.append((int.from_bytes(at, "big"), topic, payload))
            return None
        finally:
            dealer.close(linger=0)
