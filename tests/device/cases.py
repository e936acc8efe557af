"""What a rank does when a test asks for it; see ``rank``."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from kvd.core.layout.shards import page_share
from kvd.device.arena import DeviceArena, aligned
from kvd.device.collectives import Disagreement, Gather, agree
from kvd.device.sequence import Split, shard
from kvd.device.symmetric import open_arena

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.device.collectives import Pending
    from kvd.device.sequence import Sharding

HOST = torch.device("cpu")
JUNK = 0xA5
"""What memory is full of before a gather: padding that survives is not zero then."""


class Rank(NamedTuple):
    number: int
    group: dist.ProcessGroup
    device: torch.device = HOST


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


def arena_of(window_bytes: int, device: torch.device = HOST) -> DeviceArena:
    return DeviceArena(torch.full((window_bytes,), JUNK, dtype=torch.uint8, device=device))


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
    mine = whole[torch.from_numpy(sharding.rows(rank.number))].to(rank.device)
    gather = Gather(rank.group, arena_of(window_bytes, rank.device))

    if to is None:
        got = gather.start(mine, sharding).wait()
    else:
        got = gather.start(mine, sharding, to=to).wait()
        whole = whole if to == rank.number else whole[:0]

    return "" if same(got.cpu(), whole) else f"{sharding} {dtype} {shape}: other bits"


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


def gather_shapes(rank: Rank) -> dict[str, bool]:
    """What engines hand over: slices, out buffers at odd places, tensors with gradients."""
    ranks, number = rank.group.size(), rank.number
    sharding = shard(Split.ZIGZAG, [21, 30], ranks)
    gather = Gather(rank.group, arena_of(0))
    whole = batch(51, (4, 6), "bfloat16", 11)
    own = torch.from_numpy(sharding.rows(number))
    turned = whole[own].transpose(1, 2).contiguous().transpose(1, 2)
    odd = torch.zeros(51 * 24 + 3, dtype=torch.bfloat16)[3:].view(51, 4, 6)
    learned = whole[own].float().requires_grad_()
    with torch.inference_mode():
        frozen = torch.zeros_like(whole)
        started = gather.start(whole[own], sharding, out=frozen)
    filled = gather.start(whole[own], sharding, out=odd).wait()
    with torch.inference_mode():
        made = gather.start(whole[own], sharding).wait()
    made.add_(0)  # a tensor of inference mode raises here
    return {
        "not contiguous": same(gather.start(turned, sharding).wait(), whole),
        "out at an odd place": filled is odd and same(odd, whole),
        "with gradients": same(gather.start(learned, sharding).wait(), whole.float()),
        "out of inference mode": started.wait() is frozen and same(frozen, whole),
    }


def gather_refused(rank: Rank) -> list[str]:
    """What is said of arguments that do not fit; nothing is sent, so the ranks stay together."""
    ranks, number = rank.group.size(), rank.number
    sharding = shard(Split.ZIGZAG, [16], ranks)
    gather = Gather(rank.group, arena_of(0))
    x = torch.zeros(sharding.counts[number], 2)
    wrong: list[Callable[[], object]] = [
        lambda: gather.start(x[1:], sharding),
        lambda: gather.start(x, sharding, out=torch.zeros(15, 2)),
        lambda: gather.start(x, sharding, out=torch.zeros(16, 2, dtype=torch.float64)),
        lambda: gather.start(x, sharding, out=torch.zeros(2, 16).t()),
        lambda: gather.start(x, shard(Split.ZIGZAG, [16], ranks + 1)),
    ]
    said = []
    for call in wrong:
        try:
            call()
        except ValueError as refused:
            said.append(str(refused))
    gather.start(x, sharding).wait()
    return said


def gather_in_window(rank: Rank) -> list[Any]:
    """Sizes around a window of 16 KiB: where blocks lay, what was counted."""
    ranks = rank.group.size()
    arena = arena_of(16384)
    gather = Gather(rank.group, arena)
    for number, lengths in enumerate([[10], [9, 9], [200], [7], [400], [33, 50]]):
        sharding = shard(Split.ZIGZAG, lengths, ranks)
        whole = batch(sharding.tokens, (8, 16), "uint8", number)
        mine = whole[torch.from_numpy(sharding.rows(rank.number))]
        if not same(gather.start(mine, sharding).wait(), whole):
            return [f"other bits in {lengths}"]
    usage = arena.usage
    counted = [usage.in_window, usage.too_large, usage.largest_bytes, usage.allocations]
    return [*counted, arena.take(1).start]


def gather_traces(rank: Rank) -> dict[str, bool]:
    """What a gather leaves in its window, which is full of junk before."""
    ranks, number = rank.group.size(), rank.number
    sharding = shard(Split.ZIGZAG, [10], ranks)
    whole = batch(10, (8, 16), "uint8", 4)
    mine = whole[torch.from_numpy(sharding.rows(number))]
    window = torch.full((4096,), JUNK, dtype=torch.uint8)
    arena = DeviceArena(window)
    Gather(rank.group, arena).start(mine, sharding).wait()
    send_bytes = sharding.max_len * 128
    sent = window[:send_bytes].view(-1, 8, 16)
    received = window[aligned(send_bytes) :][: ranks * send_bytes].view(-1, 8, 16)
    is_padding = torch.ones(received.shape[0], dtype=torch.bool)
    is_padding[torch.from_numpy(sharding.order())] = False
    return {
        "sent from the window": same(sent[: mine.shape[0]], mine),
        "two rows of padding": int(is_padding.sum()) == 2,
        "padding is zero": not received[is_padding].any(),
        "no user is left": not arena._window.users,
    }


def gather_after_warm_up(rank: Rank, window_bytes: int) -> list[Any]:
    """After a warm-up: allocations of the arena, how many calls of torch returned new memory.

    And which did in a last gather that has to allocate its result.
    """
    ranks = rank.group.size()
    arena = arena_of(window_bytes)
    gather = Gather(rank.group, arena)
    gather.warm_up(shard(Split.ZIGZAG, [512, 300], ranks), (8, 16), torch.float32)
    before = arena.usage.allocations
    out = torch.empty(812, 8, 16)
    batches = [shard(Split.ZIGZAG, lengths, ranks) for lengths in ([512, 300], [100], [812])]
    own = [torch.zeros(one.counts[rank.number], 8, 16) for one in batches]
    with Watched() as watched:
        for sharding, x in zip(batches, own, strict=True):
            first = gather.start(x, sharding, out=out[: sharding.tokens])
            second = gather.start(x, sharding, out=out[: sharding.tokens])
            first.wait()
            second.wait()
        made = len(watched.made)
        gather.start(own[1], batches[1]).wait()
    return [arena.usage.allocations - before, made, watched.made]


class Watched(TorchFunctionMode):
    """Which calls of torch in this thread returned memory that they were not given."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        given, got = (
            {one.untyped_storage().data_ptr() for one in tree_leaves(of) if torch.is_tensor(one)}
            for of in ((args, kwargs), returned)
        )
        if got - given:
            self.made.append(func.__name__)
        return returned


def gather_for_sending(rank: Rank, tokens: int, page_size: int) -> list[Any]:
    """Pages that a rank would send of a gathered prompt, and the bytes in them."""
    ranks, number = rank.group.size(), rank.number
    sharding = shard(Split.INTERLEAVED, [tokens], ranks)
    whole = batch(tokens, (1, 8), "uint8", 21)
    mine = whole[torch.from_numpy(sharding.rows(number))]
    got = Gather(rank.group, arena_of(4096)).start(mine, sharding).wait()
    pages = torch.full((16, page_size, 1, 8), JUNK, dtype=torch.uint8)
    slots = torch.arange(got.shape[0])
    pages[slots // page_size, slots % page_size] = got
    share = page_share(0, -(-got.shape[0] // page_size), number, ranks)
    untouched = bool((pages[share[1] if number == ranks - 1 else 16 :] == JUNK).all())
    return [list(share), untouched, same(pages.view(-1, 1, 8)[:tokens], whole)]


def start_only(rank: Rank, tokens: int) -> str:
    """Start a gather and come back; ``wait_for_it`` ends it."""
    sharding = shard(Split.ZIGZAG, [tokens], rank.group.size())
    whole = batch(tokens, (8, 16), "bfloat16", 9)
    mine = whole[torch.from_numpy(sharding.rows(rank.number))]
    begun.append((Gather(rank.group, arena_of(0)).start(mine, sharding), whole))
    return ""


def wait_for_it(rank: Rank) -> str:
    pending, whole = begun.pop()
    return "" if same(pending.wait(), whole) else "other bits"


def open_one(rank: Rank, window_bytes: int, poor: list[int]) -> list[Any]:
    """An arena whose window is plain memory; ``poor`` ranks cannot allocate theirs."""
    windows = PlainWindows(rank.number in poor)
    arena = open_arena(rank.group, HOST, window_bytes=window_bytes, windows=windows)
    sharding = shard(Split.ZIGZAG, [20], rank.group.size())
    whole = batch(20, (8, 16), "bfloat16", 9)
    mine = whole[torch.from_numpy(sharding.rows(rank.number))]
    is_same = same(Gather(rank.group, arena).start(mine, sharding).wait(), whole)
    return [arena.usage.window_bytes, windows.registered, arena.usage.in_window, is_same]


def gather_through_nccl(rank: Rank, window_bytes: int) -> list[int]:
    """A window of NCCL's, filled more than once round: bytes of it, gathers in it that are right.

    More gathers than the window has room for are started before the first is waited for.
    """
    arena = open_arena(rank.group, rank.device, window_bytes=window_bytes)
    gather = Gather(rank.group, arena)
    sharding = shard(Split.ZIGZAG, [300, 41], rank.group.size())
    own = torch.from_numpy(sharding.rows(rank.number))
    made = [batch(341, (8, 16), "bfloat16", seed) for seed in range(12)]
    started = [gather.start(whole[own].to(rank.device), sharding) for whole in made]
    right = [same(one.wait().cpu(), whole) for one, whole in zip(started, made, strict=True)]
    return [arena.usage.window_bytes, sum(right), arena.usage.in_window]


def open_by_itself(rank: Rank, window_bytes: int, is_possible: bool) -> list[int]:
    """What this rank finds out without the others: they are not called."""
    windows = PlainWindows(is_poor=False) if is_possible else None
    arena = open_arena(rank.group, HOST, window_bytes=window_bytes, windows=windows)
    return [arena.usage.window_bytes, arena.usage.plain_bytes]


class PlainWindows:
    """Windows of plain memory: what they hold is right, that peers reach it is not needed."""

    def __init__(self, is_poor: bool) -> None:
        self._is_poor = is_poor
        self.registered = 0

    def are_available(self, device: torch.device, group: dist.ProcessGroup) -> bool:
        return True

    def allocate(self, size: int, device: torch.device) -> torch.Tensor:
        if self._is_poor:
            raise torch.OutOfMemoryError(f"no {size} bytes")
        return torch.full((size,), JUNK, dtype=torch.uint8, device=device)

    def register(self, memory: torch.Tensor, group: dist.ProcessGroup) -> None:
        dist.barrier(group)
        self.registered += memory.numel()


begun: list[tuple[Pending, torch.Tensor]] = []

CASES: dict[str, Callable[..., Any]] = {
    case.__name__: case
    for case in (
        *(is_ready, agree_on, open_one, open_by_itself, start_only, wait_for_it),
        *(gather_one, gather_random, gather_misread, gather_alone, gather_shapes, gather_refused),
        gather_through_nccl,
        *(gather_in_window, gather_after_warm_up, gather_for_sending, gather_traces),
    )
}
