"""Who sends what of a prompt: classes of sources, dummies, and what is missing or there twice."""

from __future__ import annotations

import itertools

import pytest

from kvd.core.handoff.sources import PrefillSource, TokenSpan, bad_share, shares, span_of
from kvd.core.layout.shards import Shard, tp_shards
from kvd.errors import Code, Refusal
from kvd.wire.peer import ALL, Role, SourceShare

LAYERS, HEADS = 4, 4
WHOLE = (Shard(0, LAYERS, 0, HEADS),)


def stage(first: int, end: int) -> tuple[Shard, ...]:
    return (Shard(first, end, 0, HEADS),)


def ranks(first: int, end: int, tp: int) -> tuple[Shard, ...]:
    return tp_shards(HEADS, tp, (first, end), (0, LAYERS))


def replicas(first: int, end: int) -> tuple[Shard, ...]:
    """Ranks of a latent, all of which have all of it."""
    return tp_shards(1, 8, (first, end), (0, LAYERS))


def planned(
    ours: tuple[Shard, ...], *theirs: tuple[Shard, ...]
) -> tuple[SourceShare, ...] | Refusal:
    sources = tuple(PrefillSource(f"p{index}", shards) for index, shards in enumerate(theirs))
    return shares(ours, sources)


def in_short(found: tuple[SourceShare, ...] | Refusal) -> list[str]:
    """``rank/ranks``, ``-`` for a dummy, ``*`` for who sends the aux."""
    assert not isinstance(found, Refusal), found
    assert [one.part for one in found] == list(range(len(found)))
    assert {one.parts for one in found} == {len(found)}
    said = ["-" if one.role is Role.DUMMY else f"{one.rank}/{one.ranks}" for one in found]
    return [
        f"{word}*" if one.is_authoritative else word for word, one in zip(said, found, strict=True)
    ]


@pytest.mark.parametrize(
    ("ours", "theirs", "plan"),
    [
        (WHOLE, [WHOLE], ["0/1*"]),
        (WHOLE, [WHOLE] * 2, ["0/2*", "1/2"]),  # context parallel
        (WHOLE, [WHOLE] * 4, ["0/4*", "1/4", "2/4", "3/4"]),
        (WHOLE, [stage(0, 2), stage(2, 4)], ["0/1", "0/1*"]),  # scenario G13: stages
        (WHOLE, [stage(2, 4), stage(0, 2)], ["0/1*", "0/1"]),
        (WHOLE, [ranks(0, 2, 4), ranks(2, 4, 4)], ["0/1*", "0/1"]),  # tp over two nodes
        (WHOLE, [stage(0, 2), stage(2, 4)] * 2, ["0/2", "0/2*", "1/2", "1/2"]),
        (ranks(0, 2, 2), [ranks(0, 4, 8), ranks(4, 8, 8)], ["0/1*", "0/1"]),
        (ranks(0, 1, 2), [ranks(0, 1, 2), ranks(1, 2, 2)], ["0/1*", "-"]),  # a dummy
        (ranks(1, 2, 2), [ranks(0, 1, 2), ranks(1, 2, 2)], ["-", "0/1*"]),
        (stage(0, 2), [stage(0, 2), stage(2, 4)], ["0/1*", "-"]),
        (stage(0, 3), [stage(0, 2), stage(2, 4)], ["0/1", "0/1*"]),
        ((Shard(0, 4, 0, 1),), [replicas(0, 4), replicas(4, 8)], ["0/2*", "1/2"]),
        ((Shard(0, 0, 0, 1),), [(Shard(0, 0, 0, 1),)] * 2, ["0/2*", "1/2"]),  # states alone
    ],
)  # fmt: skip
def test_each_source_has_its_share(ours, theirs, plan):
    """scenario F1, G13."""
    assert in_short(planned(ours, *theirs)) == plan


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (
            WHOLE,
            [stage(0, 2)],
            "p0 has layers 0-1 of heads 0-3, which is not all that is kept here: layers 2-3 of "
            "heads 0-3 must come from elsewhere too; name every source",
        ),
        (WHOLE, [ranks(0, 2, 4)], "layers 0-3 of heads 2-3 must come from elsewhere too"),
        (WHOLE, [ranks(0, 1, 4), ranks(3, 4, 4)], "layers 0-3 of heads 1-2 must come from"),
        (WHOLE, [stage(0, 1), stage(3, 4)], "p1 has layer 3 of heads 0-3, which is not all"),
        (
            WHOLE,
            [WHOLE, stage(2, 4)],
            "p0 has layers 0-3 of heads 0-3, p1 has layers 2-3 of heads 0-3: sources have the same "
            "of what is kept here, or nothing in common",
        ),
        (WHOLE, [stage(0, 3), stage(2, 4)], "or nothing in common"),
    ],
)
def test_what_is_missing_or_there_twice_is_named(ours, theirs, words):
    found = planned(ours, *theirs)
    assert isinstance(found, Refusal)
    assert found.code is Code.LAYOUT_MISMATCH
    assert words in found.message


def test_the_cells_that_are_kept_are_sent_once_whatever_the_sources():
    """Every way to give up to three sources one of some shards: all is sent once, or refused."""
    kinds = [WHOLE, stage(0, 2), stage(2, 4), ranks(0, 2, 4), ranks(2, 4, 4), ranks(1, 2, 4)]
    accepted = 0
    for ours, n in itertools.product([WHOLE, stage(0, 2), ranks(0, 1, 2)], (1, 2, 3)):
        for theirs in itertools.product(kinds, repeat=n):
            found = planned(ours, *theirs)
            if isinstance(found, Refusal):
                continue
            accepted += 1
            assert sum(one.is_authoritative for one in found) == 1
            sent = _sent(ours, theirs, found)
            wanted = _cells(ours)
            assert sent == {(cell, page): 1 for cell in wanted for page in range(5)}
    assert accepted == 119


def _cells(shards: tuple[Shard, ...]) -> set[tuple[int, int]]:
    return {
        (layer, head)
        for one in shards
        for layer in range(one.first_layer, one.end_layer)
        for head in range(one.first_head, one.end_head)
    }


def _sent(ours, theirs, found: tuple[SourceShare, ...]) -> dict[tuple[tuple[int, int], int], int]:
    """How often each cell of each of five pages is sent."""
    times: dict[tuple[tuple[int, int], int], int] = {}
    for shards, share in zip(theirs, found, strict=True):
        start, end = span_of(share, 0, 80, 16)
        for cell in _cells(ours) & _cells(shards):
            for page in range(start // 16, end // 16):
                times[cell, page] = times.get((cell, page), 0) + 1
    return times


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("page", [1, 16])
def test_the_spans_of_a_class_tile_what_is_not_cached(ranks, page):
    """scenario F1, F3, F4: whatever is cached, whatever the prompt."""
    for prefix, prompt in itertools.product(range(0, 6 * page, page), range(1, 6 * page + 3)):
        if prefix > prompt:
            continue
        spans = [
            span_of(SourceShare(0, ranks, one, ranks), prefix, prompt, page) for one in range(ranks)
        ]
        at = prefix
        for span in spans:
            if span.start != span.end:
                assert span.start == at
                assert span.start % page == 0
                at = span.end
            else:
                assert span == TokenSpan(prefix, prefix) or ranks == 1
        assert at == prompt
        sizes = [-(-(span.end - span.start) // page) for span in spans]
        assert max(sizes) - min(sizes) <= 1


def test_a_dummy_has_no_tokens():
    assert span_of(SourceShare(0, 2, role=Role.DUMMY), 16, 100, 16) == (16, 16)


def test_a_share_that_is_none_is_refused_in_words():
    assert bad_share(ALL, "p") is None
    assert bad_share(SourceShare(1, 2, 1, 2, is_authoritative=False), "p") is None
    for share in (
        SourceShare(2, 2),
        SourceShare(0, 2, 2, 2),
        SourceShare(0, 2, 0, 3),
        SourceShare(0, 1, 0, 0),
        SourceShare(0, 0),
        SourceShare(0, 2, role=Role.DUMMY),
        SourceShare(is_authoritative=False),
    ):
        refusal = bad_share(share, "p")
        assert refusal is not None, share
        assert refusal.side == "p"
