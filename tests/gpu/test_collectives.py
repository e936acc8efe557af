"""Gathers over NCCL, where there are GPUs: one is enough for the path, several for ranks.

NCCL has one rank a GPU, so on one GPU a gather is with itself: its stream, its window and its order
are tried, its neighbours are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from kvd.device.arena import DeviceArena, plain_arena
from kvd.device.collectives import Gather, agree
from kvd.device.sequence import Split, shard
from kvd.device.symmetric import NcclWindows
from tests.device.cases import batch, same
from tests.device.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEVICES = torch.cuda.device_count()
MIB = 2**20

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not DEVICES, reason="torch sees no CUDA device here"),
]
several = pytest.mark.skipif(
    DEVICES < 2, reason=f"ranks of NCCL need a GPU each, and this host has {DEVICES}"
)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A group of one rank on the first GPU."""
    dist.init_process_group(
        "nccl",
        init_method=f"file://{tmp_path / 'store'}",
        rank=0,
        world_size=1,
        device_id=torch.device("cuda", 0),
    )
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """A rank on each GPU, at most four."""
    ranks = Ranks(min(4, DEVICES), tmp_path_factory.mktemp("ranks"), "nccl")
    try:
        ranks.run("is_ready", min(4, DEVICES))
        yield ranks
    finally:
        ranks.stop()


@pytest.mark.parametrize("window_bytes", [0, 4 * MIB], ids=["plain", "window"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32"])
def test_a_rank_gathers_with_itself(
    alone: dist.ProcessGroup, dtype: str, window_bytes: int
) -> None:
    """The whole way of a gather, which a rank alone does not take otherwise."""
    device = torch.device("cuda", 0)
    windows = NcclWindows()
    if window_bytes and not windows.are_available(device, alone):
        pytest.skip("torch has no symmetric memory for this device")
    arena = plain_arena(device)
    if window_bytes:
        memory = windows.allocate(window_bytes, device)
        windows.register(memory, alone)
        arena = DeviceArena(memory)
    gather = Gather(alone, arena, torch.cuda.Stream(device))
    sharding = shard(Split.ZIGZAG, [300, 41], 1)
    made = [batch(341, (8, 16), dtype, seed) for seed in range(20)]
    started = []
    for whole in made:
        x, route = whole.to(device), gather._routed(sharding)
        with gather._working(x):
            started.append(gather._begun(x, route, torch.empty_like(x), None))

    assert all(same(one.wait().cpu(), whole) for one, whole in zip(started, made, strict=True))
    assert arena.usage.in_window == (20 if window_bytes else 0)
    assert agree("decode_prefix_len", 64, alone) == 64


@several
@pytest.mark.parametrize("to", [None, 1])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32"])
@pytest.mark.parametrize("split", [one.value for one in Split])
def test_every_bit_of_the_batch_arrives_in_logical_order(
    every: Ranks, split: str, dtype: str, to: int | None
) -> None:
    answers = every.run(
        *("gather_one", min(4, DEVICES)),
        split=split,
        lengths=[41, 8, 9],
        shape=[8, 16],
        dtype=dtype,
        seed=1,
        to=to,
    )

    assert [(one.found, one.error) for one in answers] == [("", "")] * len(answers)


@several
def test_gathers_go_through_windows_of_nccl(every: Ranks) -> None:
    """scenario F10: of 4 MiB, which twelve gathers fill more than once."""
    answers = every.run("gather_through_nccl", min(4, DEVICES), window_bytes=4 * MIB)

    assert [one.error for one in answers] == [""] * len(answers)
    assert [one.found for one in answers] == [[4 * MIB, 12, 12]] * len(answers)


@several
def test_a_disagreement_is_raised_on_all_ranks_alike(every: Ranks) -> None:
    answers = every.run("agree_on", 2, values=[64, 0])

    assert [one.found["values"] for one in answers] == [{"0": 64, "1": 0}] * 2
