"""Posts that wait for an event of the engine's device: real transfer processes, a double of CUDA.

What is read, and when, is seen in the bytes that arrive: pages are written over after the post was
ordered and before its event comes.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from kvd.core.effects import DropAgent, Forget
from kvd.core.inputs import AgentDropped, PostDone, PostMoved, Unposted
from kvd.core.layout.seal import Seal
from kvd.transfer.orders import Alive, Probe
from kvd.wire.peer import Integrity
from tests.gpu.memory import lone
from tests.transfer.conftest import Rig
from tests.transfer.loopback import Loopback

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.transfer.conftest import Node

PAGES = [1, 2, 3]


@pytest_asyncio.fixture
async def pair(rig, double) -> tuple[Node, Node]:
    return await rig.pair(dict(double.environment))


@contextlib.contextmanager
def recorded(double, device: int = 0) -> Iterator[int]:
    """An event that has not come."""
    cuda = double.runtime
    event = cuda.event(device)
    cuda.record(event, double.held(device))
    yield event
    cuda.destroy(event)


async def looked(node: Node, number: int = 1) -> None:
    """The loop of the transfer process has come round, with everything ordered before."""
    for one in (number, number + 1):
        node.transport.order(Probe(one))
        await node.hears(Alive, number=one)


@pytest.mark.parametrize("device", [0, 1])
async def test_pages_are_read_when_the_event_has_come_and_not_before(pair, cuda, double, device):
    sender, receiver = pair
    ours, theirs = sender.memories["kv"], receiver.memories["kv"]
    before = theirs.bytes.copy()

    with recorded(double, device) as event:
        sender.post(1, receiver, PAGES, PAGES, after=cuda.share_event(event))
        sender.post(2, receiver, [9], [9])
        assert isinstance(await sender.outcome(2), PostDone)
        await looked(sender)
        assert not sender.heard(PostMoved, post=1)
        size = theirs.shape.page_bytes
        assert (theirs.bytes[: 4 * size] == before[: 4 * size]).all(), "the second post alone"
        ours.bytes[: 4 * size] = 77
        double.let_come(event)
        outcome = await sender.outcome(1)

    assert isinstance(outcome, PostDone)
    assert (theirs.bytes[size : 4 * size] == 77).all()
    assert [one.moved_bytes for one in sender.heard(PostMoved, post=1)] == [0], "it has come"


async def test_sums_are_of_the_bytes_that_the_event_has_brought(pair, cuda, double):
    sender, receiver = pair
    seal = Seal(Integrity.FULL, b"an event", 0, 3)
    sender.memories["kv"].bytes[:] = 5
    sender.post(1, receiver, PAGES, PAGES, seal=seal)
    expected = (await sender.outcome(1)).sums
    sender.memories["kv"].bytes[:] = 6

    with recorded(double) as event:
        sender.post(2, receiver, PAGES, PAGES, seal=seal, after=cuda.share_event(event))
        await looked(sender)
        sender.memories["kv"].bytes[:] = 5
        double.let_come(event)
        outcome = await sender.outcome(2)

    assert len(expected) == 3 * 8
    assert outcome.sums == expected


async def test_an_event_that_has_come_delays_nothing(pair, cuda):
    sender, receiver = pair
    event = cuda.event(0)
    cuda.record(event)

    sender.post(1, receiver, PAGES, PAGES, after=cuda.share_event(event))

    assert isinstance(await sender.outcome(1), PostDone)
    cuda.destroy(event)


async def test_posts_of_one_event_go_in_their_order_and_an_event_can_be_waited_for_again(
    pair, cuda, double
):
    sender, receiver = pair
    with recorded(double) as event:
        handle = cuda.share_event(event)
        for first in (1, 4):
            for post in range(first, first + 3):
                sender.post(post, receiver, [post], [post], after=handle)
            await looked(sender, 10 * first)
            assert not sender.heard(PostDone, post=first)
            double.let_come(event)
            await sender.outcome(first + 2)
            cuda.record(event, double.held())

    assert [one.post for one in sender.reports if isinstance(one, PostDone)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("last", [0, 1])
async def test_a_post_of_several_ranks_waits_for_the_event_of_each(pair, cuda, double, last):
    sender, receiver = pair
    ours, theirs = sender.memories["kv"], receiver.memories["kv"]
    size = theirs.shape.page_bytes
    with recorded(double) as one, recorded(double, 1) as other:
        handles = [cuda.share_event(one), cuda.share_event(other)]
        sender.post(1, receiver, PAGES, PAGES, after=b"".join(handles))
        sender.post(2, receiver, [5], [5], after=handles[1 - last])
        events = [one, other]
        double.let_come(events[1 - last])
        assert isinstance(await sender.outcome(2), PostDone)
        await looked(sender)
        assert not sender.heard(PostDone, post=1)
        ours.bytes[: 4 * size] = 77
        double.let_come(events[last])
        outcome = await sender.outcome(1)

    assert isinstance(outcome, PostDone)
    assert (theirs.bytes[size : 4 * size] == 77).all()


async def test_events_that_come_together_are_let_go_of_once(pair, cuda, double):
    """The second has come when the posts behind the first get to it, in one look."""
    sender, receiver = pair
    with recorded(double) as one, recorded(double, 1) as other:
        handles = [cuda.share_event(one), cuda.share_event(other)]
        sender.post(1, receiver, [1], [1], after=b"".join(handles))
        sender.post(2, receiver, [2], [2], after=handles[1])
        await looked(sender)
        double.let_come(one)
        double.let_come(other)
        outcomes = [await sender.outcome(post) for post in (1, 2)]
        sender.post(3, receiver, [3], [3], after=handles[0])
        outcomes.append(await sender.outcome(3))

    assert all(isinstance(outcome, PostDone) for outcome in outcomes), outcomes


@pytest.mark.parametrize("number", [0, 1])
async def test_a_rank_whose_event_fails_fails_the_post(pair, cuda, double, number):
    sender, receiver = pair
    before = receiver.memories["kv"].bytes.copy()
    with recorded(double) as one, recorded(double, 1) as other:
        handles = [cuda.share_event(one), cuda.share_event(other)]
        sender.post(1, receiver, PAGES, PAGES, after=b"".join(handles))
        await looked(sender)
        double.break_event((one, other)[number])
        double.let_come((other, one)[number])
        outcome = await sender.outcome(1)

    assert isinstance(outcome, Unposted)
    assert (receiver.memories["kv"].bytes == before).all()


@pytest.mark.parametrize("end", ["forgotten", "dropped", "broken"])
async def test_a_post_that_waits_in_vain_sends_nothing(pair, cuda, double, end):
    sender, receiver = pair
    before = receiver.memories["kv"].bytes.copy()
    with recorded(double) as event:
        sender.post(1, receiver, PAGES, PAGES, after=cuda.share_event(event))
        match end:
            case "forgotten":
                sender.transport.order(Forget(1))
                why = "given up before its event came"
            case "dropped":
                sender.transport.order(DropAgent(receiver.name, 1))
                why = "dropped before its event came"
            case _:
                double.break_event(event)
                why = "failed: asking whether an event has come: cudaErrorLaunchFailure (719)"
        outcome = await sender.outcome(1)
        double.let_come(event)
        await looked(sender)

    assert isinstance(outcome, Unposted)
    assert why in outcome.why
    assert (receiver.memories["kv"].bytes == before).all()
    if end == "dropped":
        dropped = await sender.hears(AgentDropped)
        assert sender.reports.index(outcome) < sender.reports.index(dropped)
    else:
        sender.post(2, receiver, PAGES, PAGES)
        assert isinstance(await sender.outcome(2), PostDone), "the agent serves on"


async def test_forgetting_what_does_not_wait_is_nothing(pair):
    sender, receiver = pair
    sender.post(1, receiver, PAGES, PAGES)
    sender.transport.order(Forget(1))
    sender.transport.order(Forget(99))

    assert isinstance(await sender.outcome(1), PostDone)
    await looked(sender)
    assert not sender.heard(Unposted)


async def test_garbage_in_the_place_of_an_event_fails_its_post_alone(pair):
    sender, receiver = pair

    sender.post(1, receiver, PAGES, PAGES, after=bytes(64))
    sender.post(2, receiver, PAGES, PAGES)

    outcome = await sender.outcome(1)
    assert isinstance(outcome, Unposted)
    assert "opening an event of another process on cuda:1: cudaErrorInvalidR" in outcome.why
    assert isinstance(await sender.outcome(2), PostDone)


async def test_the_event_of_a_dead_engine_cannot_be_waited_for(pair, cuda):
    sender, receiver = pair
    event = cuda.event(0)
    handle = cuda.share_event(event)
    cuda.destroy(event)

    sender.post(1, receiver, PAGES, PAGES, after=handle)

    assert isinstance(await sender.outcome(1), Unposted)


async def test_without_cuda_a_post_with_an_event_says_why(rig):
    sender, receiver = await rig.pair({"CUDART_LIBRARY": "/nowhere/libcudart.so"})

    sender.post(1, receiver, PAGES, PAGES, after=bytes(64))

    outcome = await sender.outcome(1)
    assert isinstance(outcome, Unposted)
    assert "no CUDA device can be used here: /nowhere/libcudart.so" in outcome.why


@pytest_asyncio.fixture
async def loopbacks() -> AsyncIterator[tuple[Node, Node]]:
    made = Rig("loopback")
    yield await made.pair()
    await made.end()


async def test_the_loopback_knows_no_events(loopbacks):
    sender, receiver = loopbacks
    assert isinstance(sender.transport, Loopback)

    sender.post(1, receiver, PAGES, PAGES, after=bytes(64))

    assert isinstance(await sender.outcome(1), Unposted)


def test_the_device_of_the_last_event_is_tried_first(double, cuda):
    """Of a pool in host memory: each other one costs a context on it."""
    made = [cuda.event(device) for device in (1, 0)]

    done = lone(
        str(double.path),
        """
        from kvd.transfer.devices import Devices, DeviceUnusable
        devices = Devices()
        for handle in sys.argv[1:]:
            devices.open_event(bytes.fromhex(handle))
            try:
                devices.open_event(bytes(64))
            except DeviceUnusable:
                say(cuda.number_of("cudaGetDevice"))
        """,
        *(cuda.share_event(event).hex() for event in made),
    )

    assert done.stdout.split() == ["0", "1"], f"tried last; {done.stderr}"
    for event in made:
        cuda.destroy(event)
