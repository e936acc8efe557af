"""ZMQ on the loop: nothing stalls, nobody starves, every end is a value."""

from __future__ import annotations

import asyncio
import collections
import functools
import itertools
import time
from typing import TYPE_CHECKING

import pytest
import uvloop
import zmq

from kvd.sockets import (
    BACKLOG_MESSAGES,
    DRAIN_MESSAGES,
    Frames,
    LoopSocket,
    open_dealer,
    open_router,
)
from kvd.types import Sent

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

Context = zmq.Context[zmq.Socket[bytes]]


class Pair:
    """A ROUTER and a DEALER on this loop; what each got, in order."""

    def __init__(self, context: Context, endpoint: str, *, max_frame_bytes: int) -> None:
        loop = asyncio.get_running_loop()
        self.context = context
        self.endpoint = endpoint
        self.at_router: collections.deque[Frames] = collections.deque()
        self.at_dealer: collections.deque[Frames] = collections.deque()
        self.answer: Callable[[Frames], None] = self.at_router.append
        router = open_router(context, max_frame_bytes=max_frame_bytes)
        router.bind(endpoint)
        dealer = open_dealer(context, routing_id=b"S-one")
        dealer.connect(endpoint)
        self.router = LoopSocket(router, self.on_router_message, loop=loop)
        self.dealer = LoopSocket(dealer, self.at_dealer.append, loop=loop)

    def on_router_message(self, frames: Frames) -> None:
        self.answer(frames)

    def close(self) -> None:
        self.router.close()
        self.dealer.close()


def on_both_loops(body: Callable[[Pair], Awaitable[None]]) -> Callable[..., None]:
    """Run the test on asyncio and on uvloop; the context must end with no socket left open."""

    @pytest.mark.parametrize(
        "loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
    )
    def test(loop_factory: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path) -> None:
        context: Context = zmq.Context()

        async def run() -> None:
            pair = Pair(context, f"ipc://{tmp_path}/s", max_frame_bytes=MAX_FRAME_BYTES)
            try:
                await body(pair)
            finally:
                pair.close()

        try:
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(run())
        except BaseException:
            context.destroy(linger=0)  # its sockets too, or the next test hears of them
            raise
        context.term()

    test.__name__, test.__doc__ = body.__name__, body.__doc__
    return test


MAX_FRAME_BYTES = 10_000


async def until(condition: Callable[[], bool], *, within_s: float = 5.0) -> None:
    """Let the loop run until ``condition`` holds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.001)


def has_read(pair: Pair, messages: int) -> bool:
    return len(pair.at_router) == messages


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_body_that_fails_leaves_nothing_open_for_the_next_test(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path
) -> None:
    opened: list[Context | zmq.Socket[bytes]] = []

    @on_both_loops
    async def failing(pair: Pair) -> None:
        own = open_dealer(pair.context)
        opened.extend((pair.context, pair.router._socket, pair.dealer._socket, own))
        raise ValueError("as a failed assertion would")

    with pytest.raises(ValueError, match="as a failed assertion would"):
        failing(loop_factory, tmp_path)

    assert [one.closed for one in opened] == [True] * 4


@on_both_loops
async def test_every_message_is_echoed_when_64_are_in_flight(pair: Pair) -> None:
    """A lost wake-up would stall this within the first thousands."""
    total, done = 40_000, asyncio.get_running_loop().create_future()
    seen = sent = 0

    def send_next() -> None:
        nonlocal sent
        assert pair.dealer.send([sent.to_bytes(4, "little")]) is Sent.TAKEN
        sent += 1

    def on_reply(frames: Frames) -> None:
        nonlocal seen
        assert frames == [seen.to_bytes(4, "little")]
        seen += 1
        if sent < total:
            send_next()
        elif seen == total:
            done.set_result(None)

    def echo(frames: Frames) -> None:
        assert pair.router.send(frames) is Sent.TAKEN

    pair.answer = echo
    pair.dealer._on_message = on_reply
    for _ in range(64):
        send_next()

    await asyncio.wait_for(done, 30)
    assert seen == total


@on_both_loops
async def test_a_burst_is_read_to_its_end_when_no_further_wake_comes(pair: Pair) -> None:
    """More than one drain's worth arrives behind a single edge of the descriptor."""
    burst = 10 * DRAIN_MESSAGES + 1
    for number in range(burst):
        pair.dealer.send([b"%d" % number])

    await until(lambda: len(pair.at_router) == burst)
    assert [frames[1] for frames in pair.at_router] == [b"%d" % n for n in range(burst)]


@on_both_loops
async def test_send_finds_a_message_when_it_swallowed_the_edge(pair: Pair) -> None:
    """Sending outside a drain processes libzmq's commands; what came meanwhile is still read."""
    for number in range(500):
        pair.dealer.send([b"ping"])
        if number == 0:
            await until(lambda: len(pair.at_router) == 1)
        else:
            pair.router.send([b"S-one", b"noise"])
            await until(functools.partial(has_read, pair, number + 1))


@on_both_loops
async def test_others_get_their_turn_when_one_socket_is_flooded(pair: Pair) -> None:
    turns: list[int] = []

    def look() -> None:
        turns.append(len(pair.at_router))
        if len(pair.at_router) < 1_000:
            asyncio.get_running_loop().call_soon(look)

    for _ in range(1_000):
        pair.dealer.send([b"x"])
    await until(lambda: bool(pair.at_router))
    look()
    await until(lambda: len(pair.at_router) == 1_000)

    steps = [after - before for before, after in itertools.pairwise(turns)]
    assert max(steps) <= DRAIN_MESSAGES


@on_both_loops
async def test_send_says_gone_when_no_such_peer_is_connected(pair: Pair) -> None:
    assert pair.router.send([b"nobody", b"hello"]) is Sent.GONE


@on_both_loops
async def test_send_says_full_when_the_peer_does_not_read(pair: Pair) -> None:
    """The bounded backlog is libzmq's: some thousands of messages, then an answer, never a wait."""
    deaf = open_dealer(pair.context, routing_id=b"deaf")
    deaf.connect(pair.endpoint)
    await until(lambda: pair.router.send([b"deaf", b"x"]) is Sent.TAKEN)

    taken = 1
    while (sent := pair.router.send([b"deaf", b"x" * 1_000])) is Sent.TAKEN:
        taken += 1
        assert taken < 4 * BACKLOG_MESSAGES
        if taken % 100 == 0:
            await asyncio.sleep(0)

    # Of this send alone: libzmq's own thread may make room for the next one at any time.
    assert sent is Sent.FULL
    assert taken >= BACKLOG_MESSAGES
    assert pair.router.send([b"S-one", b"others are served"]) is Sent.TAKEN
    deaf.close(linger=0)


@on_both_loops
async def test_an_oversized_frame_is_refused_by_libzmq_and_the_socket_lives(pair: Pair) -> None:
    """The sender's connection is dropped; it reconnects and is served again."""
    pair.dealer.send([b"x" * (MAX_FRAME_BYTES + 1)])
    pair.dealer.send([b"dropped with the connection"])

    await until(
        lambda: (
            pair.dealer.send([b"after"]) is Sent.TAKEN
            and any(frames[1] == b"after" for frames in pair.at_router)
        )
    )
    assert max(len(frames[1]) for frames in pair.at_router) <= MAX_FRAME_BYTES


@on_both_loops
async def test_the_first_owner_keeps_a_routing_id_when_another_claims_it(
    pair: Pair,
) -> None:
    pair.dealer.send([b"mine"])
    await until(lambda: len(pair.at_router) == 1)
    thief = open_dealer(pair.context, routing_id=b"S-one")
    thief.connect(pair.endpoint)
    thief.send(b"stolen", zmq.NOBLOCK)

    for _ in range(50):
        pair.router.send([b"S-one", b"for the owner"])
        await asyncio.sleep(0.001)
    await until(lambda: len(pair.at_dealer) == 50)
    assert [frames[1] for frames in pair.at_router] == [b"mine"]
    assert thief.poll(0) == 0
    thief.close(linger=0)


@on_both_loops
async def test_reading_goes_on_when_the_callback_raises(pair: Pair) -> None:
    """A bug in a handler costs its message; the loop's exception handler hears of it."""
    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: told.append(repr(context["exception"]))
    )

    def explode(frames: Frames) -> None:
        pair.at_router.append(frames)
        if len(pair.at_router) == 1:
            raise ValueError("first")

    pair.answer = explode
    for _ in range(3):
        pair.dealer.send([b"x"])

    await until(lambda: len(pair.at_router) == 3)
    assert told == ["ValueError('first')"]


@on_both_loops
async def test_nothing_is_read_or_sent_when_closed_inside_the_callback(pair: Pair) -> None:
    def close(frames: Frames) -> None:
        pair.at_router.append(frames)
        pair.router.close()

    pair.answer = close
    for _ in range(3):
        pair.dealer.send([b"x"])

    await until(lambda: bool(pair.at_router))
    await asyncio.sleep(0)
    assert [frames[1] for frames in pair.at_router] == [b"x"]
    assert pair.router.send([b"S-one", b"late"]) is Sent.GONE
    pair.router.close()
