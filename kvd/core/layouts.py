"""Whether the pages of two nodes are the same, and in which direction they may be sent.

Equal layouts exchange both ways. Where only the page sizes differ, the larger pages can be sent to
the node with the smaller ones, if that takes them into host memory; never the other way round,
because nobody puts pages together.
"""

from __future__ import annotations

import msgspec

from kvd.core.page_split import page_split, read_fingerprint
from kvd.core.spec import Exchanged, Host, PoolSpec, exchanged, layout_difference
from kvd.errors import Code, Refusal


class LayoutMatch(msgspec.Struct, frozen=True):
    """Why nothing is sent to a peer and taken from it, each None where something is.

    ``split``: how many of its pages each of ours is, for each component that peers compare.
    """

    sending: Refusal | None
    receiving: Refusal | None
    split: tuple[int, ...]
    difference: str


def layout_match(ours: PoolSpec, theirs: str, here: str, there: str) -> LayoutMatch:
    """Compare our pool with the fingerprint that ``there`` has sent to ``here``."""
    difference = layout_difference(ours, theirs)
    if difference is None:
        return LayoutMatch(None, None, (), "")
    found = page_split(ours, theirs)
    bare = _without_kv(ours, theirs, here, there)
    why = (
        f"{here} and {there} lay out their pools differently: {difference}; configure [pool] "
        "alike on both"
        if bare is None
        else f'{bare} has no KV to exchange: cache.mode is "prefill-only" there; set cache.mode = '
        '"radix"'
    )
    refusal = Refusal(Code.LAYOUT_MISMATCH, why, side=here)
    if found is None:
        return LayoutMatch(refusal, refusal, (), difference)
    sizes: dict[str, int | float | str] = {"ours": found.ours_tokens, "theirs": found.theirs_tokens}
    if found.ours_tokens >= found.theirs_tokens:
        smaller = Refusal(
            Code.LAYOUT_MISMATCH,
            f"pages of {here} have {found.ours_tokens} tokens, those of {there} only "
            f"{found.theirs_tokens}: ours can be cut on the way there, theirs are not put together "
            "here; to receive from there too, make pool.page_size equal on both",
            side=here,
            numbers=sizes,
        )
        return LayoutMatch(None, smaller, found.parts, difference)
    if isinstance(ours.components[0].tier, Host):
        larger = Refusal(
            Code.LAYOUT_MISMATCH,
            f"pages of {there} have {found.theirs_tokens} tokens, those of {here} "
            f"{found.ours_tokens}: theirs are cut on the way here, ours are not put together "
            "there; to send there too, make pool.page_size equal on both",
            side=here,
            numbers=sizes,
        )
        return LayoutMatch(larger, None, (), difference)
    device = Refusal(
        Code.LAYOUT_MISMATCH,
        f"pages of {there} have {found.theirs_tokens} tokens, those of {here} "
        f"{found.ours_tokens}: they are cut only where they land in host memory (family hisparse); "
        "make pool.page_size equal on both",
        side=here,
        numbers=sizes,
    )
    return LayoutMatch(device, device, (), difference)


def _without_kv(ours: PoolSpec, theirs: str, here: str, there: str) -> str | None:
    """Which of the two nodes only counts its pages; None where neither does, or both do."""
    read = read_fingerprint(theirs)
    counts_there = read is not None and _only_counts(read[1])
    if counts_there == _only_counts(exchanged(ours)):
        return None
    return there if counts_there else here


def _only_counts(components: tuple[Exchanged, ...]) -> bool:
    return bool(components) and not any(one.layers for one in components)
