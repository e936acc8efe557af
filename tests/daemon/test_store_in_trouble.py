"""Real daemons and a real store of which everything fails in turn: that costs hits and no more.

More of it: ``KVD_TROUBLE_SEEDS=20 python -m pytest tests/daemon/test_store_in_trouble.py``.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import time
from http.client import HTTPException
from typing import TYPE_CHECKING

import pytest

from kvd.harness.store import ABSENT, SECRET, SeaweedStore, weed
from kvd.storage.sizes import HEAD_BYTES
from tests.daemon.conftest import findings
from tests.daemon.kv import tokens_of
from tests.daemon.test_store import LIMIT_S, PROMPT_TOKENS, StoreNode
from tests.support.daemons import DaemonFailed
from tests.support.disks import small_disk
from tests.support.relay import Relay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.skipif(weed() is None, reason=ABSENT)

SEEDS = int(os.environ.get("KVD_TROUBLE_SEEDS", "2"))
STEPS = 20
N_PROMPTS = 24
"""More than a pool has room for."""
DISK_BYTES = 200 * 2**20
LONGEST_S = 30.0
"""Of a lease, whatever becomes of the store: it waits for 4 s."""


@pytest.fixture
def seaweed(tmp_path) -> Iterator[SeaweedStore]:
    """Its volume server has a small disk."""
    found = SeaweedStore(tmp_path / "store")
    found.directory.mkdir()
    with small_disk(found.directory / "volume0", DISK_BYTES):
        found.start()
        yield found
        found.stop()


class StoreTrouble:
    """What may happen to a store and to its nodes, each at any time."""

    def __init__(
        self, store: SeaweedStore, relay: Relay, nodes: list[StoreNode], source: random.Random
    ) -> None:
        self.store, self.relay, self.nodes, self.source = store, relay, nodes, source
        self.done: list[str] = []
        self._frozen: set[str] = set()
        self.kinds: tuple[Callable[[], None], ...] = (
            *(self.kill, self.kill, self.freeze, self.slow, self.break_off),
            *(self.heal, self.heal, self.heal, self.heal),
            *(self.fill, self.refuse_keys, self.drop_bucket, self.cut, self.flip, self.swap),
            *(self.kill_storage, self.kill_daemon),
        )

    def happen(self) -> None:
        kind = self.source.choice(self.kinds)
        self.done.append(kind.__name__)
        # It may be dead or silent already.
        with contextlib.suppress(OSError, HTTPException, ValueError):
            kind()

    # ---- its processes, and the way to them ------------------------------------------------------

    def kill(self) -> None:
        name = self.source.choice(("s3", "filer", "volume0"))
        if name in self.store.processes:
            self.store.kill(name)
            self._frozen.discard(name)

    def freeze(self) -> None:
        name = self.source.choice(("s3", "filer", "volume0"))
        if name in self.store.processes:
            self.store.processes[name].send_signal(signal.SIGSTOP)
            self._frozen.add(name)

    def slow(self) -> None:
        self.relay.pause_s = self.source.choice((0.05, 0.3, 3.0))

    def break_off(self) -> None:
        self.relay.breaks = self.source.choice((0.02, 0.3, 1.0))

    def heal(self) -> None:
        self.relay.heal()
        for name in self._frozen:
            self.store.processes[name].send_signal(signal.SIGCONT)
        self._frozen.clear()
        self._filler.unlink(missing_ok=True)
        self._take_keys("kvd-other", SECRET)
        for name in ("volume0", "filer", "s3"):
            if name not in self.store.processes:
                self.store.start_process(name)
        with contextlib.suppress(OSError, HTTPException):
            self.store.make_bucket()

    # ---- what it says and keeps ------------------------------------------------------------------

    @property
    def _filler(self):
        return self.store.directory / "volume0" / "filler"

    def fill(self) -> None:
        free = shutil.disk_usage(self._filler.parent).free
        self._filler.write_bytes(bytes(max(0, free - self.source.randrange(2**18))))

    def refuse_keys(self) -> None:
        self._take_keys(SECRET, "kvd-other")

    def _take_keys(self, before: str, secret: str) -> None:
        file = self.store.directory / "s3.json"
        text = file.read_text()
        if before in text:
            file.write_text(text.replace(before, secret))
            if "s3" in self.store.processes:
                self.store.kill("s3")
                self._frozen.discard("s3")
            self.store.start_process("s3")

    def drop_bucket(self) -> None:
        self.store.drop_bucket()

    def _object(self) -> str:
        return self.source.choice(self.store.names() or [""])

    def cut(self) -> None:
        self._spoil(lambda data: data[: self.source.randrange(len(data))])

    def flip(self) -> None:
        def flipped(data: bytes) -> bytes:
            at = self.source.choice((0, 30, HEAD_BYTES, HEAD_BYTES + 1000))
            return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

        self._spoil(flipped)

    def swap(self) -> None:
        other = self.store.get(self._object())
        self._spoil(lambda _: other)

    def _spoil(self, how: Callable[[bytes], bytes]) -> None:
        for _ in range(5):
            name = self._object()
            data = self.store.get(name)
            if name and len(data) > HEAD_BYTES + 1000:
                self.store.put(name, how(data))

    # ---- the nodes -------------------------------------------------------------------------------

    def kill_storage(self) -> None:
        with contextlib.suppress(DaemonFailed):
            os.kill(self.source.choice(self.nodes).daemon.storage_pid(), signal.SIGKILL)

    def kill_daemon(self) -> None:
        node = self.source.choice(self.nodes)
        node.daemon.kill()
        node.daemon.start()
        node.daemon.wait_ready()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_happens_to_a_store_what_is_found_belongs_there(tmp_path, seaweed, seed):
    source = random.Random(seed)
    relay = Relay(random.Random(-seed))
    relay.target = seaweed.s3_port
    sets = {
        "tiers.store.endpoint": f"http://127.0.0.1:{relay.port}",
        "tiers.store.answer_s": "1",
        "tiers.store.wait_s": "4",
        "tiers.store.probe_s": "2",
    }
    nodes = [StoreNode(name, tmp_path, seaweed, **sets) for name in ("a", "b")]
    trouble = StoreTrouble(seaweed, relay, nodes, source)
    prompts = [tokens_of(PROMPT_TOKENS, 7000 + number) for number in range(N_PROMPTS)]
    found, longest_s = 0, 0.0
    try:
        for node in nodes:
            node.start()
        there = [nodes[0].compute(prompt) for prompt in prompts]
        nodes[0].settle()
        for _ in range(STEPS):
            if source.random() < 0.7:
                trouble.happen()
            for node in nodes:
                number = source.randrange(N_PROMPTS)
                began_s = time.monotonic()
                tokens, is_now = node.found(prompts[number])
                longest_s = max(longest_s, time.monotonic() - began_s)
                assert is_now == there[number]
                assert node.compute(prompts[number]) == there[number]
                found += tokens
        trouble.heal()
        for node in nodes:
            serves_again(node, seed)
            node.daemon.wait_for(lambda node=node: not node.daemon.snapshot().leases, "holds", 30.0)
            assert findings(node.daemon) == ()
    finally:
        trouble.heal()
        for node in nodes:
            node.daemon.stop()
        relay.close()
        told = (f"seed {seed}: {found // PROMPT_TOKENS} prompts found", *trouble.done)
        sys.stderr.write(" ".join(told) + f"; the slowest took {longest_s:.1f} s\n")
    assert longest_s < LONGEST_S


def serves_again(node: StoreNode, seed: int) -> None:
    """Return when what is computed is written, and found again behind what pushed it out."""
    until_s = time.monotonic() + 3 * LIMIT_S
    prompt = tokens_of(PROMPT_TOKENS, 9000 + seed)
    while True:
        there = node.compute(prompt)
        node.push_out()
        found = node.found(prompt)
        assert found[1] == there
        if found[0] == PROMPT_TOKENS and node.tier.state == "serving":
            return
        assert time.monotonic() < until_s, node.tier
        time.sleep(0.5)
