"""An engine's own blocks and a real daemon: what counts, what waits, and a daemon that ends."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvd.client
from kvd.client import Code, KvdError
from kvd.client.mover.host_lane import HostLane
from kvd.client.mover.pending_copy import CopyState
from tests.support.copies import BYTES, LAYERS, PAGE, kept_daemon, numbered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from kvd.client import EngineBlocks, PendingCopy
    from kvd.client.mover.pieces import PieceColumns
    from tests.support.daemons import Daemon

BLOCKS = 40


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with kept_daemon(tmp_path, pages=257) as made:
        yield made


class HeldCopies:
    """Bytes that are begun move when the test says so."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.may_move = threading.Event()
        self.begun = threading.Event()
        begin = HostLane.begin

        def held(lane: HostLane, columns: PieceColumns, *, to_pages: bool) -> Any:
            self.begun.set()
            copies = self

            class Running:
                fault = None
                moved: Any = None

                @property
                def is_over(self) -> bool:
                    if not copies.may_move.is_set():
                        return False
                    self.moved = self.moved or begin(lane, columns, to_pages=to_pages)
                    return bool(self.moved.is_over)

            return Running()

        patch.setattr(HostLane, "begin", held)
        patch.setattr(HostLane, "polls", True)


def memory(seed: int = 1) -> NDArray[np.uint8]:
    return numbered(np.random.default_rng(seed), (LAYERS, BLOCKS, BYTES))


def tokens_of(pages: int, seed: int = 1) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 50_000, pages * PAGE, dtype=np.int32)


def is_away(blocks: EngineBlocks, lease: Any) -> bool:
    """Whether its worker is not back in the session."""
    try:
        blocks._checks[0](lease.key)
    except KvdError as error:
        return error.retryable
    return False


def fails(order: PendingCopy, code: Code, match: str) -> None:
    with pytest.raises(KvdError, match=match) as refused:
        order.result(5)
    assert refused.value.code == code.value


def test_what_was_saved_is_committed_found_and_loaded(daemon: Daemon) -> None:
    own, tokens = memory(), tokens_of(5)
    before = own.copy()
    with kvd.client.connect_sync(daemon.client, name="first") as node:
        blocks = node.blocks(dict(enumerate(own)), block_size=PAGE)
        lease = node.lease(tokens)
        late = blocks.begin_save(lease, {"kv": [7, 3, 4]}, first_page=2)
        blocks.begin_save(lease.key, {"kv": [9, 1]}, pages={"kv": lease.pages[:2]}).result(5)
        late.result(5)
        lease.commit()
        lease.release()
        assert node.match(tokens).tokens == 80
    with kvd.client.connect_sync(daemon.client, name="second") as node:
        blocks = node.blocks(dict(enumerate(own)), block_size=PAGE)
        lease = node.lease(tokens)
        assert lease.prefix_len >= 64
        n = lease.prefix_len // PAGE
        blocks.begin_load(lease, {"kv": [20, 21, 22, 23, 24][:n]}).result(5)
        assert (own[:, [20, 21, 22, 23, 24][:n]] == before[:, [9, 1, 7, 3, 4][:n]]).all()


@pytest.mark.parametrize("end", ["commit", "release", "retract"])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_what_is_ordered_and_has_not_begun_is_shared_by_no_commit(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, end: str, is_restarted: bool
) -> None:
    monkeypatch.setattr(HostLane, "has_come", lambda _lane, _mark: False)
    own, tokens = memory(), tokens_of(5)
    with (
        kvd.client.connect_sync(daemon.client, name="first") as node,
        kvd.client.connect_sync(daemon.client, name="second") as other,
    ):
        blocks = node.blocks(dict(enumerate(own)), block_size=PAGE)
        if is_restarted:
            daemon.kill()
            daemon.start()
            daemon.wait_ready()
            assert node.match(tokens).tokens == 0
            while is_away(blocks, node.lease(tokens_of(1, seed=9))):
                time.sleep(0.01)
        lease = node.lease(tokens)
        save = blocks.begin_save(lease, {"kv": [1, 2, 3, 4, 5]})
        if end == "commit":
            lease.commit()
        elif end == "release":
            lease.release(())
        else:
            with pytest.raises(KvdError, match="of which 0 are said to be written"):
                lease.retract()
        assert other.match(tokens).tokens == 0
        save.cancel()
        fails(save, Code.CANCELLED, "cancel")
        if end == "commit":
            lease.commit()
            lease.release(())
        assert other.match(tokens).tokens == 0


async def test_orders_are_awaited_beside_the_calls_of_a_loop(daemon: Daemon) -> None:
    own, tokens = memory(), tokens_of(4)
    async with kvd.client.connect(daemon.client, name="first") as node:
        blocks = node.blocks(dict(enumerate(own)), block_size=PAGE, threads=2)
        lease = await node.lease(tokens)
        await asyncio.gather(
            *(
                _awaited(
                    blocks.begin_save(
                        lease, {"kv": [n + 8]}, first_page=n, upto_tokens=(n + 1) * PAGE
                    )
                )
                for n in (2, 0, 3, 1)
            )
        )
        await lease.commit()
        assert (await node.match(tokens)).tokens == 64
        blocks.close()


async def _awaited(order: PendingCopy) -> None:
    await order


def test_the_daemon_refuses_what_the_lease_does_not_have(daemon: Daemon) -> None:
    own = memory()
    with kvd.client.connect_sync(daemon.client, name="first") as node:
        blocks = node.blocks(dict(enumerate(own)), block_size=PAGE)
        lease, other = node.lease(tokens_of(2)), node.lease(tokens_of(2, seed=3))
        key = lease.key
        order = blocks.begin_save(key, {"kv": [1, 2]}, pages={"kv": other.pages})
        fails(order, Code.BAD_PAGES, "are others than this order names")
        fails(blocks.begin_load(lease, {"kv": [1]}), Code.BAD_PAGES, "not all written")
        pages = lease.pages.copy()
        lease.release()
        with pytest.raises(KvdError) as refused:
            blocks.begin_save(key, {"kv": [1, 2]}, pages={"kv": pages})
        assert refused.value.code == Code.UNKNOWN_LEASE.value
        worker = kvd.client.join(daemon.client, token=node.token)
        theirs = worker.blocks(dict(enumerate(own)), block_size=PAGE)
        fails(
            theirs.begin_save(key, {"kv": [1, 2]}, pages={"kv": pages}), Code.UNKNOWN_LEASE, "lease"
        )
        worker.close()


def test_a_release_waits_for_the_copy(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    own, held = memory(), HeldCopies(monkeypatch)
    with kvd.client.connect_sync(daemon.client, name="first") as node:
        blocks = node.blocks(dict(enumerate(own)), block_size=PAGE)
        lease = node.lease(tokens_of(2))
        order = blocks.begin_save(lease, {"kv": [1, 2]})
        assert held.begun.wait(5)
        lease.release()
        time.sleep(0.05)
        assert daemon.snapshot().pools[0].held_pages == 2
        assert not order.safe()
        held.may_move.set()
        order.result(5)
        daemon.wait_for(lambda: not daemon.snapshot().leases, "still has the lease", 5.0)


def test_a_copy_over_the_death_of_the_daemon_counts_for_nothing(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is back in its session when no byte of before moves, and no earlier."""
    own, held = memory(), HeldCopies(monkeypatch)
    with kvd.client.connect_sync(daemon.client, name="first", return_within_s=30) as node:
        blocks = node.blocks(dict(enumerate(own)), block_size=PAGE)
        lease = node.lease(tokens_of(2))
        key = lease.key
        moving = blocks.begin_save(lease, {"kv": [1, 2]})
        assert held.begun.wait(5)
        before = node.incarnation
        daemon.kill()
        daemon.start()
        daemon.wait_ready()
        for _ in range(20):
            node.pump()
            time.sleep(0.01)
        assert moving.state is CopyState.MOVING
        assert node.incarnation == before
        with pytest.raises(KvdError) as refused:
            blocks.begin_load(key, {"kv": [5]}, pages={"kv": lease.pages[:1]})
        assert refused.value.retryable
        held.may_move.set()
        fails(moving, Code.UNREACHABLE, "hung up")
        assert moving.safe()

        again = node.lease(tokens_of(3, seed=5))
        assert node.incarnation != before
        daemon.wait_for(lambda: not is_away(blocks, again), "has no worker", 10.0)
        blocks.begin_save(again, {"kv": [1, 2, 3]}).result(5)
        with pytest.raises(KvdError) as stale:
            blocks.begin_load(key, {"kv": [5]}, pages={"kv": [1]})
        assert stale.value.code == Code.BEFORE_RESTART.value
        again.commit()
        lease.release()
