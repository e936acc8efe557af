"""What a rank does when a test asks for it; see ``rank``."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from kvd.device.arena import Arena
from kvd.device.collectives import Disagreement, Gather, agree
from kvd.device.sequence import Split, shard

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.device.sequence import Sharding

HOST = torch.device("cpu")
JUNK = 0xA5
"""What memory is full of before a gather: padding that survives is not zero then."""


class Rank(NamedTuple):
    number: int
    group: dist.ProcessGroup


def batch(tokens: int, shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """Logical rows of random bytes, the same in every process."""
    like = torch.empty((tokens, *shape), dtype=getattr(torch, dtype))
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (like.nbytes,), dtype=torch.uint8, generator=generator)
    return data.view(like.dtype).view(like.shape) if tokens else like


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Every bit, so that NaN is NaN."""
    return one.shape == other.shape and torch.equal(bits(one), bits(other))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def arena_of(window_bytes: int) -> Arena:
    return Arena(torch.full((window_bytes,), JUNK, dtype=torch.uint8))


def is_ready(rank: Rank) -> bool:
    """The group has come together."""
    return rank.group.rank() == rank.number


def gather_one(
    rank: Rank,
    split: str,
    lengths: list[int],
    shape: list[int],
    dtype: str,
    seed: int,
    window_bytes: int = 0,
    to: int | None = None,
) -> str:
    """Cut a batch, gather it, compare: "" or what is wrong."""
    sharding = shard(Split(split), lengths, rank.group.size())
    whole = batch(sharding.tokens, tuple(shape), dtype, seed)
    mine = whole[torch.from_numpy(sharding.rows(rank.number))]
    gather = Gather(rank.group, arena_of(window_bytes))

    if to is None:
        got = gather.start(mine, sharding).wait()
    else:
        got = gather.start_to(to, mine, sharding).wait()
        whole = whole if to == rank.number else whole[:0]

    return "" if same(got, whole) else f"{sharding} {dtype} {shape}: other bits"


def gather_random(rank: Rank, seed: int, rounds: int) -> str:
    """Random batches through one gather, some at once, with a window that is too small at times."""
    dice = random.Random(seed)
    ranks = rank.group.size()
    gather = Gather(rank.group, arena_of(dice.choice([0, 4096, 65536])))
    for number in range(rounds):
        lengths = [dice.choice([0, 1, dice.randrange(60)]) for _ in range(dice.randrange(5))]
        sharding = shard(dice.choice(list(Split)), lengths, ranks)
        made = [_random_batch(dice, sharding, number) for _ in range(dice.randrange(1, 4))]
        own = torch.from_numpy(sharding.rows(rank.number))
        started = [gather.start(whole[own], sharding) for whole in made]
        for pending, whole in zip(started, made, strict=True):
            if not same(pending.wait(), whole):
                return f"round {number}: {sharding} {whole.dtype} {tuple(whole.shape)}"
    return ""


def _random_batch(dice: random.Random, sharding: Sharding, seed: int) -> torch.Tensor:
    shapes: list[tuple[int, ...]] = [(), (1,), (3,), (2, 5), (1, 2, 3), (8, 16), (4, 0)]
    dtypes = ["bool", "uint8", "float8_e5m2", "bfloat16", "float32", "int64", "complex64"]
    dtype = dice.choice(dtypes)
    whole = batch(sharding.tokens, dice.choice(shapes), "uint8" if dtype == "bool" else dtype, seed)
    return whole > 127 if dtype == "bool" else whole


def gather_misread(rank: Rank) -> bool:
    """Whether the comparison sees two rows that changed places."""
    sharding = shard(Split.ZIGZAG, [64], rank.group.size())
    whole = batch(64, (8, 16), "bfloat16", 3)
    mine = whole[torch.from_numpy(sharding.rows(rank.number))]
    got = Gather(rank.group, arena_of(0)).start(mine, sharding).wait().clone()
    swapped = got[torch.tensor([1, 0, *range(2, 64)])]
    return same(got, whole) and not same(swapped, whole)


def gather_alone(rank: Rank) -> list[bool]:
    """One rank: the tensor itself comes back, nothing is taken, and ``out`` is filled if given."""
    arena = arena_of(4096)
    gather = Gather(rank.group, arena)
    x, out = torch.ones(7, 2), torch.zeros(7, 2)
    sharding = shard(Split.ZIGZAG, [7], 1)
    got = gather.start(x, sharding).wait()
    filled = gather.start(x, sharding, out=out).wait()
    taken = arena.usage.in_window + arena.usage.too_large
    return [got is x, filled is out, torch.equal(out, x), not taken]


def agree_on(rank: Rank, values: list[int]) -> Any:
    """The number, or what each rank is told of it."""
    try:
        return agree("decode_prefix_len", values[rank.number], rank.group)
    except Disagreement as apart:
        return {"values": {str(at): value for at, value in apart.values.items()}, "is": str(apart)}


CASES: dict[str, Callable[..., Any]] = {
    "is_ready": is_ready,
    "gather_one": gather_one,
    "gather_random": gather_random,
    "gather_misread": gather_misread,
    "gather_alone": gather_alone,
    "agree_on": agree_on,
}
