"""Who uses which bytes of an arena, with plain memory as its window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvd.device.arena import ALIGNMENT, IN_FLIGHT, ArenaUsage, DeviceArena, plain_arena

if TYPE_CHECKING:
    from kvd.device.arena import ArenaBlock

WINDOW = 4 * ALIGNMENT


def windowed() -> DeviceArena:
    return DeviceArena(torch.zeros(WINDOW, dtype=torch.uint8))


class User:
    """Holds a block until it is asked to finish."""

    def __init__(self, block: ArenaBlock) -> None:
        self.block = block
        self.is_done = False
        block.hold(self.finish)

    def finish(self) -> None:
        self.is_done = True
        self.block.release()


def test_a_block_that_comes_round_has_no_earlier_user() -> None:
    """Only those are made to finish whose bytes are needed, and only when they are."""
    arena = windowed()
    first, second = (User(arena.take(2 * ALIGNMENT)) for _ in range(2))
    assert not first.is_done

    third = User(arena.take(ALIGNMENT))
    assert (first.is_done, second.is_done) == (True, False)
    assert third.block.memory.data_ptr() == first.block.memory.data_ptr()

    arena.take(WINDOW)
    assert second.is_done
    assert third.is_done


def test_who_finished_by_itself_is_left_alone() -> None:
    arena = windowed()
    user = User(arena.take(WINDOW))
    user.finish()
    user.is_done = False

    arena.take(WINDOW)

    assert not user.is_done


def test_what_is_too_large_goes_through_plain_memory_and_is_counted() -> None:
    """scenario F10: one byte more than the window has, twice; what fits still uses the window."""
    arena = windowed()
    blocks = [arena.take(size) for size in (WINDOW, WINDOW + 1, 10, WINDOW + 1)]

    assert [block.is_symmetric for block in blocks] == [True, False, True, False]
    assert [block.memory.numel() for block in blocks] == [WINDOW, WINDOW + 1, 10, WINDOW + 1]
    assert arena.usage == ArenaUsage(
        window_bytes=WINDOW,
        in_window=2,
        too_large=2,
        largest_bytes=WINDOW + 1,
        plain_bytes=IN_FLIGHT * (WINDOW + 1),
        allocations=1,
    )


def test_plain_memory_grows_to_the_largest_and_stays() -> None:
    arena = plain_arena(torch.device("cpu"))

    counts = [(arena.take(size), arena.usage.allocations)[1] for size in (100, 50, 1000, 1000, 1)]

    assert counts == [1, 1, 2, 2, 2]
    assert arena.usage.window_bytes == arena.usage.in_window == 0


def test_a_block_of_outgrown_memory_keeps_its_bytes() -> None:
    arena = plain_arena(torch.device("cpu"))
    user = User(arena.take(64))
    user.block.memory.fill_(7)

    arena.take(10**6).memory.fill_(9)

    assert user.block.memory.tolist() == [7] * 64
    user.finish()


def test_memory_of_inference_mode_can_be_written_outside_it() -> None:
    arena = plain_arena(torch.device("cpu"))
    with torch.inference_mode():
        arena.take(64)

    arena.take(64).memory.fill_(1)
