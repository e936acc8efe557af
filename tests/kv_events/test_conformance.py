"""Routers find what a node has, and nothing else: real daemons, real engines, two consumers.

scenario R11. One consumer goes by the rules of llm-d-router's subscriber (``llmd``), the other is
Dynamo's own (``dynamo``), where ``KVD_DYNAMO_PYTHON`` names an interpreter that has it. The Go
binary of llm-d-router itself is not run.
"""

from __future__ import annotations

import random
import socket
import tempfile
import time
from typing import TYPE_CHECKING

import msgspec
import pytest
import zmq

import kvd.client
from kvd.harness.daemons import DaemonProcess, free_port
from kvd.wire import admin
from tests.kv_events.dynamo_router import PYTHON, DynamoService
from tests.kv_events.llmd import END, LlmdSubscriber

if TYPE_CHECKING:
    from pathlib import Path

MODEL = "m"
PAGE = 16
POOL = {
    "pool.pages": "257",
    "pool.huge_pages": "off",
    "pool.layers": "1",
    "pool.heads": "1",
    "pool.head_dim": "8",
    "pool.page_size": str(PAGE),
}
CATCH_UP_S = 20.0


class ToldNode:
    """A daemon that publishes KV events, and an engine's verbs that change what is cached."""

    def __init__(self, directory: Path, **settings: str) -> None:
        self.listen = f"tcp://127.0.0.1:{free_port()}"
        self.replay = f"tcp://127.0.0.1:{free_port()}"
        self.daemon = DaemonProcess(
            "n0",
            directory,
            {
                **POOL,
                "kv_events.enabled": "true",
                "kv_events.model": MODEL,
                "kv_events.listen": self.listen,
                "kv_events.replay": self.replay,
                "kv_events.heartbeat_s": "0.3",
                **settings,
            },
        )
        self._consumers: list[LlmdSubscriber | DynamoService] = []

    def start(self) -> ToldNode:
        self.daemon.start()
        self.daemon.wait_ready()
        return self

    def close(self) -> None:
        for consumer in self._consumers:
            consumer.close()
        if self.daemon.is_running:
            self.daemon.stop()

    def cache(self, *prompts: list[int], namespace: str = "") -> None:
        with kvd.client.connect_sync(self.daemon.client, name="engine") as node:
            for prompt in prompts:
                lease = node.lease(prompt, namespace=namespace)
                lease.commit()
                lease.release()

    def flush(self, namespace: str | None = None) -> None:
        self.daemon.ask(admin.Flush(1, namespace=namespace), admin.Report)

    def llmd(self, *, replays: bool = True) -> LlmdSubscriber:
        consumer = LlmdSubscriber(self.listen, self.replay if replays else None)
        self._consumers.append(consumer)
        return consumer

    def dynamo(self) -> DynamoService:
        consumer = DynamoService(self.listen, self.replay, MODEL, PAGE)
        self._consumers.append(consumer)
        return consumer


def prompt(n_blocks: int, first: int = 1) -> list[int]:
    return list(range(first, first + n_blocks * PAGE))


FIVE = prompt(5)
PARTS = [FIVE[: PAGE * n] for n in range(1, 6)]
"""A conversation that grows by a block each time."""


@pytest.fixture
def told(tmp_path):
    """Makes nodes, which are stopped in the end."""
    nodes = []

    def make(**settings: str) -> ToldNode:
        nodes.append(ToldNode(tmp_path, **settings))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


CONSUMERS = [
    "llm-d",
    "llm-d without replay",
    pytest.param(
        "dynamo",
        marks=pytest.mark.skipif(not PYTHON, reason="KVD_DYNAMO_PYTHON is not set"),
    ),
]


class Router:
    """What one of the consumers finds."""

    def __init__(self, node: ToldNode, kind: str) -> None:
        self._dynamo = node.dynamo() if kind == "dynamo" else None
        self._llmd = None if kind == "dynamo" else node.llmd(replays=kind == "llm-d")

    def finds(self, tokens: list[int], n_blocks: int) -> int:
        if self._dynamo is not None:
            return self._dynamo.until(tokens, n_blocks, CATCH_UP_S)
        llmd = self._llmd
        llmd.until(lambda one: one.index.found(tokens, MODEL, PAGE) == n_blocks, CATCH_UP_S)
        assert llmd.dropped == []
        return llmd.index.found(tokens, MODEL, PAGE)

    def media(self, tokens: list[int]) -> set[str]:
        """Where the first block of a prompt is."""
        if self._dynamo is not None:
            return self._dynamo.media(tokens)
        return self._llmd.index.media(tokens, MODEL, PAGE)


# ---- the wire ------------------------------------------------------------------------------------


def batches_from(node: ToldNode, number: int, kind: int = zmq.REQ) -> list[list[bytes]]:
    """As vLLM's own example asks: a REQ, answered by one message after the other."""
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.linger = 0
        socket.connect(node.replay)
        asked = number.to_bytes(8, "big")
        found = []
        if kind == zmq.REQ:
            socket.send(asked)
            frames = socket.recv_multipart() if socket.poll(5000) else []
            return [frames]
        socket.send_multipart([b"", asked])
        while socket.poll(5000):
            found.append(socket.recv_multipart())
            if found[-1][2] == END:
                return found
        raise AssertionError("no END")


def test_six_blocks_are_stored_and_removed_and_a_replay_from_five_goes_to_the_last(told):
    node = told(**{"kv_events.heartbeat_s": "3600"}).start()
    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.linger = 0
        sub.connect(node.listen)
        sub.subscribe("kv@")
        heard = []

        def hear(n: int) -> list[dict]:
            while len(heard) < n:
                assert sub.poll(10_000), heard
                heard.append(sub.recv_multipart())
            return msgspec.msgpack.decode(heard[n - 1][2])[1]

        # The first number was published before anybody came: whoever comes hears all anew.
        assert hear(1) == [{"type": "AllBlocksCleared"}]
        node.cache(prompt(6))
        (stored,) = hear(2)
        node.flush()
        (removed,) = hear(3)
        for n in range(1, 5):
            node.cache(prompt(n, 1000 * n))
            hear(3 + n)
    hashes = stored.pop("block_hashes")
    assert stored == {
        "type": "BlockStored",
        "parent_block_hash": None,
        "token_ids": prompt(6),
        "block_size": 16,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
    }
    assert len(set(hashes)) == 6
    assert removed == {"type": "BlockRemoved", "block_hashes": hashes, "medium": "CPU"}
    assert {frames[0] for frames in heard} == {b"kv@n0@m"}
    numbers = [int.from_bytes(frames[1], "big") for frames in heard]
    assert numbers == list(range(1, 8))

    found = batches_from(node, 5, zmq.DEALER)
    assert [frames[2] for frames in found] == [heard[4][1], heard[5][1], heard[6][1], END]
    assert [frames[3] for frames in found[:-1]] == [frames[2] for frames in heard[4:]]
    assert found[-1] == [b"", b"", END, b""]
    assert batches_from(node, 5)[0] == [b"kv@n0@m", heard[4][1], heard[4][2]]
    assert batches_from(node, 8, zmq.DEALER) == [[b"", b"", END, b""]]


def test_a_batch_is_one_of_vllm_and_adapter_and_salt_are_where_it_has_them(told):
    node = told().start()
    llmd = node.llmd()
    node.cache(prompt(2), namespace="base#lora=pirate")
    node.cache(prompt(2), namespace="base#salt=beef")
    assert llmd.until(lambda one: one.index.found(prompt(2), "pirate", PAGE) == 2)
    assert llmd.until(lambda one: len(one.index.key_of) == 4)
    # Salted, it is nobody's who does not know the salt.
    assert llmd.index.found(prompt(2), MODEL, PAGE) == 0
    assert llmd.dropped == []


# ---- consumers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONSUMERS)
def test_who_comes_late_finds_all_though_the_batches_are_not_kept_any_more(told, kind):
    node = told(**{"kv_events.keep_batches": "2"}).start()
    for part in PARTS:
        node.cache(part)
        time.sleep(0.05)  # a batch each, most of which are gone
    router = Router(node, kind)
    assert router.finds(FIVE, 5) == 5
    node.cache(prompt(3, 500))
    assert router.finds(prompt(3, 500), 3) == 3
    node.flush()
    assert router.finds(FIVE, 0) == 0


@pytest.mark.parametrize("kind", CONSUMERS)
def test_who_comes_while_everything_is_kept_finds_all(told, kind):
    node = told().start()
    node.cache(*PARTS)
    assert Router(node, kind).finds(FIVE, 5) == 5


@pytest.mark.parametrize("kind", CONSUMERS)
def test_what_was_stored_twice_is_gone_when_it_is_removed_once(told, kind):
    node = told().start()
    router = Router(node, kind)
    node.cache(FIVE, FIVE, FIVE)
    assert router.finds(FIVE, 5) == 5
    node.flush()
    assert router.finds(FIVE, 0) == 0


@pytest.fixture
def shared_memory():
    with tempfile.TemporaryDirectory(prefix="kvd-test-", dir="/dev/shm") as name:
        yield {"pool.backing": "shm", "pool.directory": name}


@pytest.mark.parametrize("kind", CONSUMERS)
def test_after_a_warm_restart_what_survived_is_found_and_what_goes_then_is_not(
    told, shared_memory, kind
):
    node = told(**shared_memory).start()
    node.cache(prompt(3), namespace="a")
    node.cache(prompt(2, 900), namespace="b")
    router = Router(node, kind)
    assert router.finds(prompt(3), 3) == 3
    assert router.finds(prompt(2, 900), 2) == 2
    before = node.daemon.snapshot().kv_events.last_number
    node.daemon.stop()
    node.start()
    node.flush("b")
    assert router.finds(prompt(2, 900), 0) == 0
    assert router.finds(prompt(3), 3) == 3
    assert node.daemon.snapshot().kv_events.last_number > before


@pytest.mark.parametrize("kind", CONSUMERS)
def test_what_is_demoted_is_found_in_storage_and_not_in_the_pool_any_more(told, tmp_path, kind):
    node = told(
        **{
            "pool.pages": "33",
            "tiers.disk.directory": str(tmp_path / "disk"),
            "tiers.disk.size": "16MiB",
            "tiers.disk.max_moving": "1MiB",
        }
    ).start()
    router = Router(node, kind)
    node.cache(FIVE)
    for n in range(1, 13):
        node.cache(prompt(5, 1000 * n))
        time.sleep(0.2)
    assert router.finds(FIVE, 5) == 5
    state = node.daemon.snapshot()
    assert state.tiers[0].objects >= 5
    assert router.media(FIVE) == {"storage"}
    node.flush()
    assert router.finds(FIVE, 0) == 0


@pytest.mark.parametrize("kind", CONSUMERS)
def test_after_a_kill_only_what_survived_is_found(told, kind):
    node = told().start()
    node.cache(FIVE)
    router = Router(node, kind)
    assert router.finds(FIVE, 5) == 5
    node.daemon.kill()
    node.start()
    node.cache(prompt(3))
    assert router.finds(FIVE, 3) == 3


def test_numbers_that_a_killed_daemon_did_not_use_are_no_gap(told):
    node = told(**{"kv_events.heartbeat_s": "3600"}).start()
    node.cache(FIVE)
    llmd = node.llmd()
    assert llmd.until(lambda one: one.index.found(FIVE, MODEL, PAGE) == 5)
    llmd.hear(1.5)
    before = llmd.last
    node.daemon.kill()
    node.start()
    node.cache(prompt(3))
    assert llmd.until(lambda one: one.last is not None and one.last >= 4096)
    assert llmd.until(lambda one: one.index.found(FIVE, MODEL, PAGE) == 3)
    assert (llmd.failures, before is not None and before < 20) == (0, True)


def test_who_asks_within_a_second_is_served_by_one_snapshot(told):
    node = told(**{"kv_events.keep_batches": "1"}).start()
    for part in PARTS:
        node.cache(part)
    time.sleep(0.2)
    for _ in range(5):
        assert batches_from(node, 0, zmq.DEALER) == [[b"", b"", END, b""]]
    time.sleep(2.5)
    told_of = node.daemon.snapshot().kv_events
    assert (told_of.snapshots, told_of.replays, told_of.blocks) == (1, 5, 5)


def test_who_does_not_read_costs_nobody_else_anything(told):
    """A subscriber that is stopped, with socket buffers full: the others hear everything."""
    node = told().start()
    slow = node.llmd(replays=False)
    slow.hear(0.1)
    with zmq.Context() as context, context.socket(zmq.SUB) as stuck:
        stuck.linger = 0
        stuck.rcvhwm = 1
        stuck.connect(node.listen)
        stuck.subscribe("")
        node.cache(*[prompt(40, 10_000 * n) for n in range(1, 200)])
        last = prompt(40, 10_000 * 199)
        assert slow.until(lambda one: one.index.found(last, MODEL, PAGE) == 40)
    assert slow.dropped == []


def test_a_daemon_that_is_not_told_to_publishes_nothing(told):
    node = told(**{"kv_events.enabled": "false"}).start()
    assert node.daemon.snapshot().kv_events is msgspec.UNSET
    host, port = node.listen.removeprefix("tcp://").split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), 1)


def test_a_subscriber_that_goes_and_comes_again_is_told_of_everything(told):
    node = told().start()
    first = node.llmd(replays=False)
    assert first.until(lambda one: not one.dropped)
    first.close()
    node.cache(FIVE)
    again = LlmdSubscriber(node.listen, None)
    try:
        assert again.until(lambda one: one.index.found(FIVE, MODEL, PAGE) == 5)
    finally:
        again.close()


def test_garbage_at_either_socket_costs_nobody_anything(told):
    node = told().start()
    llmd = node.llmd()
    rng = random.Random(7)
    for endpoint in (node.listen, node.replay):
        host, port = endpoint.removeprefix("tcp://").split(":")
        for _ in range(20):
            with socket.create_connection((host, int(port)), 5) as rude:
                rude.sendall(rng.randbytes(rng.randrange(1, 500)))
    with zmq.Context() as context, context.socket(zmq.XSUB) as greedy:
        greedy.linger = 0
        greedy.connect(node.listen)
        for n in range(1000):
            greedy.send(b"\1topic %d" % n)
        greedy.send_multipart([b"no", b"topic"])
        node.cache(FIVE)
        assert llmd.until(lambda one: one.index.found(FIVE, MODEL, PAGE) == 5)
    assert (llmd.dropped, llmd.failures) == ([], 0)


def test_what_is_no_question_is_not_answered(told):
    node = told().start()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(node.replay)
        for frames in ([b"x"], [b"", b"short"], [b"", b"x" * 8, b"more"], [b"x", b"y" * 8]):
            dealer.send_multipart(frames)
        assert not dealer.poll(500)
