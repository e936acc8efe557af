"""``benchmarks decode_radix`` at its smallest: real daemons, NIXL over a cable that is counted."""

from __future__ import annotations

import pytest

from benchmarks.decode_radix import PAGE_BYTES, PAGE_TOKENS, LinkShape, measure_link
from kvd.harness.child import ChildFailed
from kvd.harness.netns import NoNamespaces, need_namespaces

SHAPE = LinkShape(
    shared_tokens=3 * PAGE_TOKENS,
    own_tokens=PAGE_TOKENS + 1,
    output_tokens=4,
    at_once=2,
    requests=4,
    rounds=1,
    step_s=0.005,
    link_bytes_per_s=5e6,
)


@pytest.mark.slow
def test_sent_is_what_was_not_shared_when_the_cache_is_on_and_all_when_it_is_off():
    try:
        need_namespaces()
    except NoNamespaces as why:
        pytest.skip(str(why))

    found = measure_link(SHAPE, lambda _: None)

    on, off = found.tables[0].rows
    # Three shared pages, one of its own, and a partial one; the first request brings the shared.
    assert on["told_bytes"] == on["counted_bytes"] == on["bound_bytes"] == (5 + 4 * 2) * PAGE_BYTES
    assert off["told_bytes"] == off["counted_bytes"] == off["bound_bytes"] == 25 * PAGE_BYTES
    assert all(row["cable_bytes"] > row["bound_bytes"] for row in (on, off))
    assert all(row["gap_p50_ms"] > 4 for row in (on, off))


def test_it_says_in_words_why_there_is_no_narrow_link(monkeypatch):
    def no_rights() -> None:
        raise NoNamespaces("network namespaces need root")

    monkeypatch.setattr("kvd.harness.netns.need_namespaces", no_rights)

    with pytest.raises(ChildFailed, match=r"no narrow link here: network namespaces need root"):
        measure_link(SHAPE, lambda _: None)


def test_outputs_differ_around_what_was_asked_for():
    shortest, end = SHAPE.outputs

    assert (shortest, end) == (3, 6)
