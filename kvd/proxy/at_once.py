"""A prompt that both engines are asked at the same time: one computes it while the other gets it.

The proxy names the room, and tells the prefill engine to open it and the decode engine where it is
going to be. So what one has computed travels while it computes the rest, and the decode engine
begins with the last of it. That takes a prefill engine which opens rooms that it is told of, and
whose daemon is known by its name: an engine of kvd's connector says both with an answer, so its
first prompt goes in turn. So does each prompt of engines that say nothing of it, and of two engines
beside one daemon, where nothing travels.

When nothing comes of it at the prefill engine, the decode engine waits in vain: it is hung up on,
unless it answers already, and asked anew.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from kvd.proxy.bodies import Body
    from kvd.proxy.engines import ProxiedEngine
    from kvd.proxy.tries import HeardAnswer, Tries

T = TypeVar("T")

MOST_BEFORE: Final = 8
"""Behind so many prompts at one engine the next goes in turn: its decode engine would hold pages
for what is not begun, and compute it in the end."""


class PrefillEnd(NamedTuple):
    """What came of a prompt at prefill engines.

    Attributes:
        transfer: where its KV is; None: nowhere.
        refusal: what the client did wrong, in the words of the engine.
        is_failed: it broke there, or was turned away.
        may_retry: another one may be tried.
    """

    transfer: Body | None = None
    refusal: HeardAnswer | None = None
    is_failed: bool = False
    may_retry: bool = False


class PromptAtOnce:
    """One prompt that is being computed, for a decode engine that has been told of its room.

    Args:
        prefill: what comes of it at the prefill engine.
        transfer: what the decode engine is told.
        when_over: is called when the prefill engine has no more to do with it.
    """

    def __init__(
        self,
        prefill: Coroutine[object, object, PrefillEnd],
        transfer: Body,
        when_over: Callable[[], None],
    ) -> None:
        self._prefill = asyncio.ensure_future(prefill)
        self._prefill.add_done_callback(lambda _: when_over())
        self.transfer = transfer

    @property
    def end(self) -> PrefillEnd | None:
        """What came of it, if nothing comes to that room; None where it comes, or may."""
        if not self._prefill.done():
            return None
        end = self._prefill.result()
        return None if room_in(end.transfer) == room_in(self.transfer) else end

    async def beside(self, decode: Coroutine[object, object, T], tries: Tries) -> T | None:
        """What comes of the decode engine; None too where it was hung up on, since it waits."""
        decoding = asyncio.ensure_future(decode)
        try:
            await asyncio.wait({self._prefill, decoding}, return_when=asyncio.FIRST_COMPLETED)
            if self.end is not None and not tries.is_answering:
                decoding.cancel()
            await asyncio.wait({decoding})
            return None if decoding.cancelled() else decoding.result()
        finally:
            await _ended(decoding)

    async def close(self) -> None:
        """Nobody waits for it any more."""
        await _ended(self._prefill)


async def _ended(task: asyncio.Future[T]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait({task})


def to_come(node: str, room: str) -> Body:
    """What the decode engine is told of a room that is about to be opened on that node."""
    return {"kvd": {"v": 1, "peer": node, "room": room, "soon": True}}


def room_in(transfer: Body | None) -> tuple[str, str] | None:
    """The node and the room that it names; None where it names none."""
    told = transfer.get("kvd") if transfer is not None else None
    if not isinstance(told, dict):
        return None
    node, room = told.get("peer"), told.get("room")
    return (node, room) if isinstance(node, str) and isinstance(room, str) and room else None


def may_meet(prefill: ProxiedEngine, decode: ProxiedEngine) -> bool:
    """Whether both can be asked at once."""
    is_soon = prefill.open_requests < MOST_BEFORE
    return bool(prefill.opens_at) and is_soon and not _are_beside(prefill, decode)


def _are_beside(one: ProxiedEngine, other: ProxiedEngine) -> bool:
    """Whether both have one daemon, as far as is known: then nothing travels."""
    is_one = one.address.daemon == other.address.daemon != ""
    return is_one or one.address.url == other.address.url
