"""What lies inside a page: where its elements are, what peers say of it, and what may be cut."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvd.core.layout.geometry import geometry
from kvd.core.layout.shards import Shard, lanes, tp_shards
from kvd.core.layout.spec import (
    MAX_TAG_CHARS,
    Component,
    HeldShards,
    Host,
    Interior,
    Mha,
    Mla,
    PageOrder,
    PoolSpec,
    Raw,
    fingerprint,
    layout_difference,
    read_shards,
    shard_of,
)
from kvd.core.peers.compatibility import LayoutMatch, PageSplit, layout_match, page_split
from kvd.errors import Code, Refusal
from tests.core.sentences import sentence_of

LAYERS, HEADS = 4, 8
NHD, HND, OPAQUE = Interior.NHD, Interior.HND, Interior.OPAQUE
HEADED, LATENT = Mha(HEADS, 16, 8, "bfloat16"), Mla(32, 8, "bfloat16")


def kv(interior: Interior = NHD, layout: Any = HEADED, page_size: int = 16) -> Component:
    return Component("kv", LAYERS, layout, page_size, interior=interior)


def pool(component: Component, *shards: Shard, tag: str = "", heads: int = HEADS) -> PoolSpec:
    held = None
    if shards:
        held = HeldShards(component.layers, heads, shards)
        component = shard_of(component, shards[0])
    return PoolSpec("main", "mha", PageOrder.PAGE_FIRST, (component,), (8,), held=held, tag=tag)


def ranks(size: int, heads: int = HEADS) -> tuple[Shard, ...]:
    return tp_shards(heads, size, (0, size), (0, LAYERS))


def match(ours: PoolSpec, theirs: PoolSpec) -> LayoutMatch:
    return layout_match(ours, fingerprint(theirs), "d", "p")


def refused(found: LayoutMatch) -> Refusal:
    """Both directions, for one reason."""
    assert found.sending is not None
    assert found.sending == found.receiving
    assert found.sending.code is Code.LAYOUT_MISMATCH
    assert found.difference
    return found.sending


# ---- where the elements are ----------------------------------------------------------------------


@pytest.mark.parametrize("order", PageOrder)
@pytest.mark.parametrize(
    ("component", "shapes"),
    [
        (kv(NHD), [("k", (16, 8, 16)), ("v", (16, 8, 8))]),
        (kv(HND), [("k", (8, 16, 16)), ("v", (8, 16, 8))]),
        (kv(OPAQUE), [("raw", (16 * 8 * 24 * 2,))]),
        (kv(NHD, LATENT), [("latent", (16, 1, 40))]),
        (kv(OPAQUE, LATENT), [("raw", (16 * 40 * 2,))]),
        (kv(HND, Mha(HEADS, 24, 0, "bfloat16")), [("k", (8, 16, 24))]),
        (kv(OPAQUE, Raw(100)), [("raw", (100,))]),
    ],
)
def test_a_page_has_the_shape_that_its_interior_says(component, shapes, order) -> None:
    found = geometry(component, pages=3, order=order)

    assert [(one.part, one.page_shape) for one in found.tensors] == shapes * LAYERS
    assert found.page_bytes == geometry(kv(NHD, component.layout), pages=3, order=order).page_bytes


@pytest.mark.parametrize(
    ("component", "slots", "heads", "layers"),
    [
        (kv(NHD), 16, HEADS, LAYERS),
        (kv(HND), 1, HEADS, LAYERS),
        (kv(OPAQUE), 0, 0, 0),
        (kv(OPAQUE, Raw(64)), 0, 0, 0),
    ],
)
def test_what_a_page_can_be_cut_by(component, slots, heads, layers) -> None:
    """Of opaque pages the transfer process is told nothing that it could cut by."""
    found = geometry(component, pages=3, order=PageOrder.PAGE_FIRST)

    assert (found.page_tokens, found.heads, found.layers) == (slots, heads, layers)


# ---- what peers are told -------------------------------------------------------------------------


def test_a_fingerprint_says_what_is_not_as_it_always_was_and_nothing_else() -> None:
    plain = fingerprint(pool(kv()))
    shards = ",[[0,4,0,4],[0,4,4,8]]]"

    assert "interior" not in plain
    assert fingerprint(pool(kv(HND))) == plain.replace("}}]]", '},"interior":"hnd"}]]')
    assert fingerprint(pool(kv(), tag="a 1")) == plain[:-1] + ',"a 1"]'
    assert fingerprint(pool(kv(), *ranks(2), tag="a 1")) == plain[:-1] + ',"a 1"' + shards


@pytest.mark.parametrize("tag", ["", "a 1", '"],["'])
@pytest.mark.parametrize("shards", [(), ranks(2)])
def test_a_tag_and_shards_are_told_apart(tag: str, shards: tuple[Shard, ...]) -> None:
    text = fingerprint(pool(kv(), *shards, tag=tag))

    assert read_shards(text) == (fingerprint(pool(kv(), tag=tag)), shards)
    assert layout_difference(pool(kv(), *shards, tag=tag), text) is None


@pytest.mark.parametrize(
    ("ours", "theirs", "difference"),
    [
        (pool(kv()), pool(kv(HND)), "components.0.interior: ours nhd, theirs hnd"),
        (pool(kv(OPAQUE)), pool(kv()), "components.0.interior: ours opaque, theirs nhd"),
        (pool(kv()), pool(kv(), tag="a"), "tag: ours nothing, theirs a"),
        (pool(kv(), tag="a"), pool(kv(), *ranks(2), tag="b"), "tag: ours a, theirs b"),
    ],
)
def test_both_values_are_told_though_one_is_never_written(ours, theirs, difference) -> None:
    assert layout_difference(ours, fingerprint(theirs)) == difference


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [(), ranks(2)])
def test_unlike_interiors_are_refused_with_both(shards: tuple[Shard, ...]) -> None:
    refusal = refused(match(pool(kv(HND)), pool(kv(), *shards)))

    assert refusal.message == sentence_of("unlike interiors are refused with both")
    assert (refusal.side, refusal.numbers) == ("d", {"ours": "hnd", "theirs": "nhd"})


@pytest.mark.parametrize("shards", [(), ranks(2)])
def test_unlike_tags_are_refused_with_both(shards: tuple[Shard, ...]) -> None:
    refusal = refused(match(pool(kv(), *shards, tag="a 1 avx2"), pool(kv(), tag="a 1 avx512")))

    assert refusal.message == sentence_of("unlike tags are refused with both")
    assert (refusal.side, refusal.numbers) == ("d", {"ours": "a 1 avx2", "theirs": "a 1 avx512"})


def test_a_tag_that_only_one_has_is_refused_too() -> None:
    refusal = refused(match(pool(kv()), pool(kv(), tag="a 1")))

    assert refusal.message == sentence_of("a tag that only one has is refused too")


def test_a_long_tag_of_a_stranger_is_cut() -> None:
    refusal = refused(match(pool(kv()), pool(kv(), tag="x" * 60_000)))

    assert len(refusal.message) < 600
    assert refusal.numbers["theirs"] == "x" * MAX_TAG_CHARS


def test_where_more_differs_all_of_it_is_told() -> None:
    theirs = pool(kv(HND, page_size=32), tag="a")

    assert refused(match(pool(kv()), theirs)).message == sentence_of(
        "where more differs all of it is told"
    )


@pytest.mark.parametrize("last", ["7", "null", "{}", '"a","b"', "[[0,4,0,8]],[[0,4,0,8]]"])
def test_what_is_no_tag_is_another_layout(last: str) -> None:
    text = fingerprint(pool(kv()))[:-1] + f",{last}]"

    assert (
        "lay out their pools differently"
        in refused(layout_match(pool(kv()), text, "d", "p")).message
    )


def test_what_is_equal_but_written_differently_is_not_said_to_be_packed_otherwise() -> None:
    text = fingerprint(pool(kv(), *ranks(2))).replace('"page_size":16', '"page_size": 16')

    message = refused(layout_match(pool(kv(), *ranks(2)), text, "d", "p")).message

    assert "equal, but written differently" in message


def test_what_is_no_interior_is_another_layout() -> None:
    text = fingerprint(pool(kv(HND))).replace('"hnd"', '"dhn"')

    found = refused(layout_match(pool(kv()), text, "d", "p"))

    assert "components.0.interior: ours nhd, theirs dhn" in found.message


# ---- what may be cut -----------------------------------------------------------------------------


@pytest.mark.parametrize("interior", [NHD, HND])
@pytest.mark.parametrize("ours", [(), ranks(2), ranks(16)])
@pytest.mark.parametrize("theirs", [(), ranks(4)])
def test_pages_whose_heads_are_known_are_cut_between_shards(interior, ours, theirs) -> None:
    found = match(pool(kv(interior), *ours), pool(kv(interior), *theirs))

    whole = (Shard(0, LAYERS, 0, HEADS),)
    assert found.sending is found.receiving is None
    assert found.outgoing == lanes(ours or whole, theirs or whole)


CUT = [
    ((), ranks(2)),
    (ranks(2), ()),
    (ranks(2), ranks(4)),
    ((), (Shard(0, 2, 0, HEADS),)),
    (ranks(2), (Shard(2, 4, 0, HEADS),)),
]
WHOLE = [
    ((), ()),
    (ranks(2), ranks(2)),
    (ranks(2), ranks(2) * 2),
    (ranks(4), ranks(4)[:2]),
    (ranks(2)[:1], ranks(2)[1:]),
    (ranks(16), ranks(8)),
]
"""The last: two ranks with one head each have equal pages."""


@pytest.mark.parametrize(("ours", "theirs"), CUT)
def test_opaque_pages_are_not_cut(ours, theirs) -> None:
    found = match(pool(kv(OPAQUE), *ours), pool(kv(OPAQUE), *theirs))

    refused(found)
    assert found.outgoing == found.incoming == ()


def test_who_would_cut_opaque_pages_is_told_what_either_keeps() -> None:
    refusal = refused(match(pool(kv(OPAQUE)), pool(kv(OPAQUE), *ranks(2))))

    assert refusal.message == sentence_of("who would cut opaque pages is told what either keeps")


@pytest.mark.parametrize(("ours", "theirs"), WHOLE)
def test_opaque_pages_go_whole_between_equal_shards(ours, theirs) -> None:
    found = match(pool(kv(OPAQUE), *ours), pool(kv(OPAQUE), *theirs))

    assert found.sending is found.receiving is None
    assert found.difference == ""


def test_latents_of_any_number_of_ranks_are_whole_pages() -> None:
    """Every rank has all of them, so there is nothing to cut, opaque or not."""
    of_two = pool(kv(OPAQUE, LATENT), *ranks(2, heads=1), heads=1)
    of_four = pool(kv(OPAQUE, LATENT), *ranks(4, heads=1), heads=1)

    assert match(of_two, of_four).sending is None
    assert match(of_four, pool(kv(OPAQUE, LATENT))).receiving is None


@pytest.mark.parametrize(
    ("interior", "split"), [(NHD, PageSplit(16, 64, (4,))), (HND, None), (OPAQUE, None)]
)
def test_only_pages_that_lie_token_by_token_are_cut_by_tokens(interior, split) -> None:
    ours = kv(interior)
    ours = msgspec.structs.replace(ours, tier=Host())
    theirs = pool(msgspec.structs.replace(ours, page_size=64))

    assert page_split(pool(ours), fingerprint(theirs)) == split
    assert (match(pool(ours), theirs).receiving is None) is (split is not None)


# ---- opaque ranks --------------------------------------------------------------------------------


def raw(tp_size: int, *shards: Shard) -> PoolSpec:
    return pool(kv(OPAQUE, Raw(4096, tp_size)), *shards, heads=tp_size)


def test_each_rank_of_opaque_bytes_has_pages_of_its_own() -> None:
    """Rank 1 of two is no copy of rank 0, as the ranks of a latent are."""
    both = raw(2, *ranks(2, heads=2))

    found = match(both, both)
    assert [(one.peer_shard, one.copies[0].shard) for one in found.outgoing] == [(0, 0), (1, 1)]
    assert match(raw(2, *ranks(2, heads=2)[:1]), raw(2, *ranks(2, heads=2)[1:])).outgoing == ()


def test_opaque_bytes_of_more_ranks_are_other_pages() -> None:
    refusal = refused(match(raw(1), raw(2, *ranks(2, heads=2))))

    assert refusal.message == sentence_of("opaque bytes of more ranks are other pages")
