"""Every component of every pool family: sent, cut where the peer's pages are smaller, verified.

Asked of the loopback and of real transfer processes; expected is what an engine sees through its
tensors. scenario E1, scenario E4, scenario E12.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
import pytest_asyncio

from kvd.core.effects import Copy, Verify
from kvd.core.inputs import Copied, PostDone, PostFailed, Verified
from kvd.core.layout.seal import Seal, page_sum
from kvd.core.layout.spec import (
    Layout,
    Mha,
    Mla,
    PageOrder,
    Raw,
    State,
    StateTensor,
    companion_pages,
)
from kvd.transfer.copies import Area, copy_job
from kvd.transfer.orders import UNSTAMPED
from kvd.wire.peer import Integrity
from tests.transfer.conftest import Memory, Rig
from tests.transfer.layouts import ids, note, shaped, slots
from tests.transfer.test_contract import numbers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvd.core.layout.geometry import Geometry

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGES = 9
"""Of each component at the sender, the null page included; the receiver has as many tokens."""


class Kind(NamedTuple):
    """One component, and by how much the sender's page is larger than the receiver's."""

    layout: Layout
    page_size: int
    split: int = 1
    layers: int = 3


LATENT = Mla(24, 8, "bfloat16")
FP8 = Mha(4, 32, 16, "float8_e4m3fn")
SCALE = Mha(4, 1, 1, "float32")
INDEX = Mha(1, 12, 0, "uint8")
STATE = State((StateTensor("ssm", (4, 2, 8), "float32"), StateTensor("conv", (6, 2), "bfloat16")))
KINDS = {
    "mla": Kind(LATENT, 8),
    "mla cut in 2": Kind(LATENT, 8, 2),
    "mla cut in 4": Kind(LATENT, 8, 4),
    "mla cut into tokens": Kind(LATENT, 8, 8),
    "many handles": Kind(Mla(224, 32, "bfloat16"), 64, 4, layers=16),
    "index": Kind(INDEX, 4),
    "index cut in 4": Kind(INDEX, 4, 4),
    "fp8": Kind(FP8, 8),
    "fp8 cut in 2": Kind(FP8, 8, 2),
    "scale": Kind(SCALE, 8),
    "scale cut in 2": Kind(SCALE, 8, 2),
    "swa": Kind(Mha(2, 8, 8, "float16"), 4),
    "state": Kind(STATE, 1),
    "opaque": Kind(Raw(100), 4),
}
KEPT = ("mla.saved", "scale.saved", "state.saved", "buffer")
"""Regions that no peer writes into."""

PAIRS = [("loopback", here, there) for here in PageOrder for there in PageOrder] + [
    ("nixl", order, order) for order in PageOrder
]


def regions(order: PageOrder, *, is_receiver: bool) -> dict[str, Geometry]:
    """All components of one side."""
    found = {}
    for name, kind in KINDS.items():
        cut = kind.split if is_receiver else 1
        found[name] = shaped(kind.layout, kind.page_size // cut, PAGES * cut, order, kind.layers)
    for name in KEPT:
        kind = KINDS[name.removesuffix(".saved")] if name != "buffer" else KINDS["mla"]
        found[name] = shaped(kind.layout, kind.page_size, 5, order)
    return found


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    params=PAIRS,
    ids=lambda one: f"{one[0]}-{one[1].value}-{one[2].value}",
)
async def pools(request) -> AsyncIterator[tuple]:
    """A sender and a receiver of every component, laid out in one order or another."""
    kind, here, there = request.param
    rig = Rig(kind)
    nodes = await asyncio.gather(
        rig.node("sender", shapes=regions(here, is_receiver=False)),
        rig.node("receiver", shapes=regions(there, is_receiver=True)),
    )
    await nodes[0].load(nodes[1])
    yield nodes
    await rig.end()


def chosen(name: str, n_pages: int = 5) -> tuple[list[int], list[int]]:
    """Pieces of scattered pages of ours, the last one in part, and pages of theirs for them."""
    split = KINDS[name].split
    pages = [6, 2, 3, 8, 1][:n_pages]
    pieces = np.frombuffer(companion_pages(ids(pages), split), "<i4").tolist()
    pieces = pieces[: len(pieces) - split // 2]
    onto = [7, 5, 6, 4, 1, *range(9, PAGES * split)][: len(pieces)]
    return pieces, onto


def full_seal(n_pages: int) -> Seal:
    return Seal(Integrity.FULL, b"f" * 16, 3, 3 + n_pages)


def fill(memory) -> None:
    """Bytes of every value, other ones in every page."""
    memory.bytes[:] = np.random.default_rng(next(numbers)).integers(0, 256, memory.bytes.size, "u1")


def delivered(sender, receiver, name, pieces, onto):
    """The whole region of the receiver as it must be then."""
    kind, ours, theirs = KINDS[name], sender.memories[name], receiver.memories[name]
    expected = theirs.bytes.copy()
    for of, to in zip(slots(ours.bytes, ours.shape), slots(expected, theirs.shape), strict=True):
        size = to.shape[1]
        for piece, page in zip(pieces, onto, strict=True):
            first = piece % kind.split * size
            to[page] = of[piece // kind.split, first : first + size]
    return expected


def post(sender, receiver, name, pieces, onto):
    """Order a post that is summed in full; its number."""
    number = next(numbers)
    sender.post(
        number,
        receiver,
        pieces,
        onto,
        component=name,
        seal=full_seal(len(pieces)),
        first_page=3,
        split=KINDS[name].split,
    )
    return number


async def verified(receiver, name, onto, sums):
    ticket = next(numbers)
    receiver.transport.order(Verify(ticket, name, full_seal(len(onto)), ids(onto), sums))
    return await receiver.hears(Verified, ticket=ticket)


@pytest.mark.parametrize("name", KINDS)
async def test_pages_arrive_slot_by_slot_and_nothing_else_changes(pools, name):
    sender, receiver = pools
    ours, theirs = sender.memories[name], receiver.memories[name]
    fill(ours)
    fill(theirs)
    pieces, onto = chosen(name)
    expected = delivered(sender, receiver, name, pieces, onto)

    number = post(sender, receiver, name, pieces, onto)
    outcome = await sender.outcome(number)

    size = len(pieces) * theirs.shape.page_bytes
    assert outcome == PostDone(UNSTAMPED, number, size, outcome.sums, active_s=outcome.active_s)
    assert np.array_equal(theirs.bytes, expected)
    assert (await verified(receiver, name, onto, outcome.sums)).bad_pages == ()


@pytest.mark.parametrize("name", KINDS)
async def test_sums_take_a_page_of_the_receiver_tensor_by_tensor(pools, name):
    sender, receiver = pools
    fill(sender.memories[name])
    pieces, onto = chosen(name)
    theirs = receiver.memories[name]

    outcome = await sender.outcome(post(sender, receiver, name, pieces, onto))

    seal, tensors = full_seal(len(pieces)), slots(theirs.bytes, theirs.shape)
    wanted = [
        page_sum(seal, logical, [tensor[page].tobytes() for tensor in tensors])
        for logical, page in enumerate(onto, 3)
    ]
    assert np.frombuffer(outcome.sums, "<u8").tolist() == wanted


@pytest.mark.parametrize("name", ["mla cut in 4", "fp8 cut in 2", "scale", "state"])
async def test_a_damaged_page_is_named_by_its_place_among_the_receivers(pools, name):
    sender, receiver = pools
    fill(sender.memories[name])
    pieces, onto = chosen(name)
    outcome = await sender.outcome(post(sender, receiver, name, pieces, onto))

    theirs = receiver.memories[name]
    slots(theirs.bytes, theirs.shape)[-1][onto[2], 0, -1] ^= 1

    assert (await verified(receiver, name, onto, outcome.sums)).bad_pages == (5,)


async def test_eight_bit_values_and_their_scales_arrive_bit_by_bit(pools):
    sender, receiver = pools
    for name in ("fp8", "scale"):
        fill(sender.memories[name])
        assert isinstance(
            await sender.outcome(post(sender, receiver, name, [2, 3], [5, 4])), PostDone
        )
        pairs = zip(
            slots(sender.memories[name].bytes, sender.memories[name].shape),
            slots(receiver.memories[name].bytes, receiver.memories[name].shape),
            strict=True,
        )
        for ours, theirs in pairs:
            assert np.array_equal(ours[[2, 3]], theirs[[5, 4]])
    received = receiver.memories["fp8"]
    found = np.concatenate([one[[4, 5]].ravel() for one in slots(received.bytes, received.shape)])
    assert np.unique(found).size == 256


async def test_the_components_of_a_pool_travel_side_by_side(pools):
    sender, receiver = pools
    for node, name in ((node, name) for node in pools for name in KINDS):
        fill(node.memories[name])
    plans = {name: chosen(name) for name in KINDS}
    expected = {name: delivered(sender, receiver, name, *plans[name]) for name in KINDS}

    posts = {name: post(sender, receiver, name, *plans[name]) for name in KINDS}
    outcomes = {name: await sender.outcome(number) for name, number in posts.items()}
    found = [await verified(receiver, name, plans[name][1], outcomes[name].sums) for name in KINDS]

    assert [one.bad_pages for one in found] == [()] * len(KINDS)
    for name in KINDS:
        assert np.array_equal(receiver.memories[name].bytes, expected[name]), name


@pytest.mark.parametrize(
    ("name", "split", "complaint"),
    [
        ("state", 2, "pages of region 'state' cannot be cut into 2 pieces"),
        ("opaque", 2, "pages of region 'opaque' cannot be cut into 2 pieces"),
        ("mla", 2, "cut into 2, are not the pages of 8 slots there"),
        ("mla cut in 2", 1, "lay both out alike"),
        ("mla cut in 2", 4, "cut into 4, are not the pages of 4 slots there"),
        ("mla cut in 2", 16, "have 8 slots, which do not make 16 equal pieces"),
        ("mla cut in 2", -2, "cannot be cut into -2 pieces"),
        ("buffer", 1, "region 'buffer'"),
        ("mla.saved", 1, "region 'mla.saved'"),
    ],
)
async def test_a_post_that_does_not_fit_the_peers_pages_is_refused(pools, name, split, complaint):
    sender, receiver = pools
    before = receiver.memories[name].bytes.copy()

    number = next(numbers)
    seal = full_seal(1)
    sender.post(number, receiver, [4], [1], component=name, split=split, seal=seal, first_page=3)
    outcome = await sender.outcome(number)

    assert isinstance(outcome, PostFailed)
    assert complaint in outcome.why
    assert np.array_equal(receiver.memories[name].bytes, before)


@pytest.mark.parametrize(
    ("of", "to"),
    [
        ("mla", "buffer"),
        ("buffer", "mla"),
        *((one.removesuffix(".saved"), one) for one in KEPT[:3]),
    ],
)
async def test_pages_are_copied_between_a_component_and_what_is_kept_of_it(pools, of, to):
    node, _ = pools
    for name in (of, to):
        fill(node.memories[name])
    ours, theirs = node.memories[of], node.memories[to]
    expected = theirs.bytes.copy()
    for read, store in zip(
        slots(ours.bytes, ours.shape), slots(expected, theirs.shape), strict=True
    ):
        store[[1, 2, 4]] = read[[3, 4, 2]]

    ticket = next(numbers)
    node.copy(ticket, of, [3, 4, 2], to, [1, 2, 4])

    assert await node.copied(ticket) == Copied(UNSTAMPED, ticket, 3 * ours.shape.page_bytes)
    assert np.array_equal(theirs.bytes, expected)


@pytest.mark.parametrize("orders", [tuple(PageOrder), tuple(reversed(PageOrder))])
async def test_a_copy_between_memory_of_different_orders_goes_tensor_by_tensor(orders):
    ours, theirs = (Memory(order.value, shaped(SCALE, 8, 5, order)) for order in orders)
    for memory in (ours, theirs):
        fill(memory)
    areas = {one.name: Area(note(one.shape), one.bytes) for one in (ours, theirs)}
    expected = [tensor.copy() for tensor in slots(theirs.bytes, theirs.shape)]
    for read, store in zip(slots(ours.bytes, ours.shape), expected, strict=True):
        store[[1, 2]] = read[[4, 2]]

    copy_job(Copy(1, ours.name, ids([4, 2]), theirs.name, ids([1, 2])), areas).step()

    for found, wanted in zip(slots(theirs.bytes, theirs.shape), expected, strict=True):
        assert np.array_equal(found, wanted)
