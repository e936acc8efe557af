"""Real storage processes over a real store: what one writes another finds, and nothing else."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from kvd.harness import store as seaweed
from kvd.harness.store import SeaweedStore, weed
from kvd.storage.orders import ObjectPart
from kvd.storage.sizes import HEAD_BYTES
from tests.storage.site import KIB, LAYER_FIRST, SCALES, StoreSite, key
from tests.support.moto import ABSENT, MotoStore, moto

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

AnyStore = SeaweedStore | MotoStore

KEYS = [key(n) for n in range(6)]
"""Of pages 1 to 6."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("seaweed", marks=pytest.mark.skipif(weed() is None, reason=seaweed.ABSENT)),
        pytest.param("moto", marks=pytest.mark.skipif(moto() is None, reason=ABSENT)),
    ],
)
def store(request, tmp_path_factory) -> Iterator[AnyStore]:
    """Two dialects of S3."""
    directory = tmp_path_factory.mktemp(request.param)
    found: AnyStore = MotoStore(directory)
    if request.param == "seaweed":
        found = SeaweedStore(directory, volumes=3, copies=1)
    found.start()
    yield found
    found.stop()


def needs(store: AnyStore, what: str) -> None:
    """Leave the test out with a store that lacks it."""
    if isinstance(store, MotoStore):
        pytest.skip(store.lacks[what])


@pytest_asyncio.fixture(loop_scope="module")
async def make(store) -> AsyncIterator[Callable]:
    """Makes sites of one store that serve."""
    made: list[StoreSite] = []

    async def one(*of, **other) -> StoreSite:
        made.append(StoreSite(store, *of, **other))
        await made[-1].start()
        return made[-1]

    yield one
    for site in made:
        await site.stop()
        site.close()


async def test_what_one_node_wrote_another_finds_as_it_was(make):
    a, b = await make(), await make()
    were = [a.page(page) for page in range(1, 7)]
    b.forget()

    written = await a.demote(KEYS, [1, 2, 3, 4, 5, 6], "shared")
    probed = await b.probe([*KEYS, key(99)], "shared")
    promoted = await b.promote(KEYS, [26, 25, 24, 23, 22, 21], "shared")

    assert (written.written, written.why) == (tuple(range(6)), "")
    assert (probed.n_there, probed.why) == (6, "")
    assert (promoted.bad, promoted.why) == ((), "")
    assert [b.page(26 - n) for n in range(6)] == were
    assert promoted.n_bytes == sum(map(len, were))


# ---- what lies -----------------------------------------------------------------------------------


def _flipped(store: AnyStore, name: str, at: int) -> None:
    data = bytearray(store.get(name))
    data[at] ^= 1
    store.put(name, bytes(data))


def _swapped(store: AnyStore, name: str, other: str) -> None:
    one, two = store.get(name), store.get(other)
    store.put(name, two)
    store.put(other, one)


BAD = {
    "gone": (lambda s, a, _: s.delete(a), "the store has it not", {2}),
    "empty": (lambda s, a, _: s.put(a, b""), "", {2}),
    "half written": (lambda s, a, _: s.put(a, s.get(a)[: HEAD_BYTES + 8 * KIB]), "the sum", {2}),
    "cut in its head": (lambda s, a, _: s.put(a, s.get(a)[:100]), "", {2}),
    "of nothing": (lambda s, a, _: s.put(a, bytes(HEAD_BYTES + 64 * KIB)), "does not begin", {2}),
    "its head": (lambda s, a, _: _flipped(s, a, 20), "its head is damaged", {2}),
    "first byte": (lambda s, a, _: _flipped(s, a, HEAD_BYTES), "the sum", {2}),
    "last byte": (lambda s, a, _: _flipped(s, a, HEAD_BYTES + 64 * KIB - 1), "the sum", {2}),
    "swapped": (_swapped, "under another name", {2, 3}),
    "page of another": (
        lambda s, a, b: s.put(a, s.get(a)[:HEAD_BYTES] + s.get(b)[HEAD_BYTES:]),
        "the sum",
        {2},
    ),
}
"""What happens to the third of six objects, what is said of it, and which are bad then."""


@pytest.mark.parametrize("what", BAD)
async def test_an_object_that_lies_is_never_used_and_not_there_for_the_next_one(make, what):
    site, (damage, why, bad) = await make(), BAD[what]
    were = [site.page(page) for page in range(1, 7)]
    await site.demote(KEYS, [1, 2, 3, 4, 5, 6], what)
    damage(site.store, site.name(KEYS[2], what), site.name(KEYS[3], what))

    promoted = await site.promote(KEYS, [11, 12, 13, 14, 15, 16], what)

    assert set(promoted.bad) == bad
    assert why in promoted.why
    assert [site.page(11 + n) for n in range(6) if n not in bad] == [
        were[n] for n in range(6) if n not in bad
    ]
    for n in bad:
        assert (await site.probe([KEYS[n]], what)).n_there == 0
    again = await site.demote(KEYS, [1, 2, 3, 4, 5, 6], what)
    promoted = await site.promote(KEYS, [11, 12, 13, 14, 15, 16], what)
    assert (len(again.written), promoted.bad) == (6, ())
    assert [site.page(11 + n) for n in range(6)] == were


async def test_what_is_of_another_layout_or_another_namespace_is_not_there(make):
    ours, theirs = await make(), await make(layout="theirs")
    await theirs.demote(KEYS, [1, 2, 3, 4, 5, 6], "n")

    assert (await ours.probe(KEYS, "n")).n_there == 0
    assert (await theirs.probe(KEYS, "m")).n_there == 0
    # One that was copied over from there is no object of ours either.
    theirs.store.put(
        f"tests/{ours.layout}/=n/{KEYS[0].hex()}", theirs.store.get(theirs.name(KEYS[0], "n"))
    )
    assert (await ours.probe(KEYS, "n")).n_there == 0
    assert (await ours.promote(KEYS[:1], [9], "n")).bad == (0,)


NAMESPACES = ["", "n", "..", "a/b", "llama#x\x1f3", "=", "ß" * 200, "x" * 300]


async def test_namespaces_are_kept_apart_whatever_they_are_called(make):
    site = await make()
    for number, namespace in enumerate(NAMESPACES):
        await site.demote([key(7)], [number + 1], namespace)
    for number, namespace in enumerate(NAMESPACES):
        promoted = await site.promote([key(7)], [20], namespace)
        assert promoted.bad == ()
        assert site.page(20) == site.page(number + 1)


SHAPES = {
    "layer first": ({"kv": LAYER_FIRST}, (ObjectPart("kv"),)),
    "with scales": (
        {"kv": LAYER_FIRST, "scale": SCALES},
        (ObjectPart("kv"), ObjectPart("scale", 2)),
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_pages_of_many_pieces_come_back_as_they_were(make, shape):
    site = await make(*SHAPES[shape], layout=shape)
    were = [site.page(page) for page in range(1, 7)]

    await site.demote(KEYS, [1, 2, 3, 4, 5, 6])
    promoted = await site.promote(KEYS, [11, 12, 13, 14, 15, 16])

    assert promoted.bad == ()
    assert [site.page(11 + n) for n in range(6)] == were


@pytest.mark.parametrize("n_there", [0, 1, 2, 7, 33, 199, 200])
async def test_how_many_are_there_is_found_in_few_looks(make, n_there):
    site = await make()
    keys, namespace = [key(1000 + n) for n in range(200)], f"leading {n_there}"
    pages = [1 + n % 32 for n in range(n_there)]
    await site.demote(keys[:n_there], pages, namespace)

    together = await asyncio.gather(*(site.probe(keys, namespace) for _ in range(3)))

    assert [probed.n_there for probed in together] == [n_there] * 3
    assert not [probed.why for probed in together if probed.why]


# ---- a store that is gone, silent, or half there -------------------------------------------------


async def test_a_port_that_is_closed_is_told_at_once_after_the_first_time(make, store):
    site = await make(answer_s=1.0)
    site.endpoint = "http://127.0.0.1:1"
    await site.stop()
    await site.start()

    first = await site.demote(KEYS, [1, 2, 3, 4, 5, 6])
    await asyncio.sleep(1.1)
    began_s = time.monotonic()
    outcomes = [
        await site.demote(KEYS, [1, 2, 3, 4, 5, 6]),
        await site.promote(KEYS, [1, 2, 3, 4, 5, 6]),
    ]

    assert (first.written, first.why) == ((), f"{site.endpoint}: no answer within 1 s")
    assert outcomes[0].why == f"{site.endpoint}: Connection refused"
    assert set(outcomes[1].bad) == set(range(6))
    assert time.monotonic() - began_s < 5


async def test_a_silent_store_is_given_up_soon_and_serves_again_when_it_speaks(make, store):
    site = await make(answer_s=1.0)
    await site.demote(KEYS, [1, 2, 3, 4, 5, 6], "silent")
    before = site.page(9)
    store.freeze()
    try:
        began_s = time.monotonic()
        promoted = await site.promote(KEYS, [9, 10, 11, 12, 13, 14], "silent")
        probed = await site.probe([key(5)], "silent")
        took_s = time.monotonic() - began_s
    finally:
        store.thaw()

    assert set(promoted.bad) == set(range(6))
    assert promoted.why.endswith("no answer within 1 s")
    assert probed.why.endswith("no answer within 1 s")
    assert took_s < 15
    # What NIXL still read then was read into memory of the storage process.
    await asyncio.sleep(2.0)
    assert site.page(9) == before
    promoted = await site.promote(KEYS, [21, 22, 23, 24, 25, 26], "silent")
    assert promoted.bad == ()
    assert [site.page(21 + n) for n in range(6)] == [site.page(1 + n) for n in range(6)]


async def test_keys_that_the_store_refuses_cost_hits_and_nothing_else(make, store, tmp_path):
    needs(store, "keys")
    site = await make()
    await site.demote(KEYS, [1, 2, 3, 4, 5, 6], "refused")
    wrong = tmp_path / "wrong"
    wrong.write_text("[default]\naws_access_key_id = x\naws_secret_access_key = y\n")
    site.credentials_file = wrong
    await site.stop()
    await site.start()

    demoted = await site.demote([key(77)], [1], "refused")
    promoted = await site.promote(KEYS, [9, 10, 11, 12, 13, 14], "refused")

    assert (demoted.written, demoted.why) == ((), "the store has it not, or refuses it")
    assert set(promoted.bad) == set(range(6))
    assert len(site.names("refused")) == 6, "what is refused is written over by nobody"


async def test_a_volume_server_that_is_killed_under_load_costs_nothing_that_has_a_copy(make, store):
    needs(store, "volumes")
    site = await make(answer_s=10.0)
    keys = [key(5000 + n) for n in range(120)]
    pages = [1 + n % 32 for n in range(120)]
    were = {page: site.page(page) for page in set(pages)}
    before = await site.demote(keys[:60], pages[:60], "volumes")
    assert len(before.written) == 60

    under_load = asyncio.ensure_future(site.demote(keys[60:], pages[60:], "volumes"))
    await asyncio.sleep(0.2)
    store.kill("volume1")
    try:
        after = await under_load
        found = []
        for at in range(0, 60, 20):
            promoted = await site.promote(keys[at : at + 20], list(range(1, 21)), "volumes")
            found += [at + n for n in range(20) if n not in promoted.bad]
            for n in range(20):
                if n not in promoted.bad:
                    assert site.page(1 + n) == were[pages[at + n]]
                site.regions[0].bytes[(1 + n) * 64 * KIB : (2 + n) * 64 * KIB] = 0
    finally:
        store.start_process("volume1")

    assert len(found) == 60, "each object is on two of three volume servers"
    assert len(after.written) <= 60
    assert all(after.why for _ in range(60 - len(after.written)))
