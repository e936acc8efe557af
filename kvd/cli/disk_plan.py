"""What a disk and a store below a planned pool hold, and their sections: of ``kvd config plan``.

The sizes of objects are those of the storage process, and what moves at a time is bounded as in a
daemon: a section from here, pasted below the pool that it was planned for, is what the check takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from msgspec.structs import asdict

from kvd.config.render import as_file
from kvd.config.schema import DiskTierSection, StoreTierSection
from kvd.core.layout.page_sizes import MOST_PAGE_TOKENS
from kvd.core.settings import TIER_SHARE
from kvd.families import FAMILIES
from kvd.families.budget import size_bytes
from kvd.families.model import NotPlanned
from kvd.storage.sizes import object_bytes
from kvd.types import amount

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvd.config.plan import FamilyPlan
    from kvd.config.vllm_plan import VllmPlan
    from kvd.families import Value

DIRECTORY: Final = "/var/lib/kvd/tiers/disk"
EPOCHS_DIRECTORY: Final = "/var/lib/kvd"
ENDPOINT: Final = "http://127.0.0.1:8333"
BUCKET: Final = "kvd"

WRITTEN_OVER_BARE: Final = {64 * 2**10: 0.06, 512 * 2**10: 0.2}
"""By bytes of a page, how fast objects are written beside bare NIXL: measured on two cores and one
disk. At ``QUICK_BYTES`` it was 0.8 and more in three runs."""

QUICK_BYTES: Final = 2 * 2**20


class PlannedPages(NamedTuple):
    """Of a pool: tokens of a page, its bytes over all layers and shards, and how many there are."""

    tokens: int
    n_bytes: int
    n_pages: int


class TierPlan(msgspec.Struct, frozen=True):
    """A tier. ``tokens`` fit there, in ``objects`` of ``object_bytes``, one for each page."""

    page_bytes: int
    object_bytes: int
    objects: int
    tokens: int
    max_moving: str
    toml: str


class DiskPlan(TierPlan, frozen=True):
    """A disk tier."""

    quick_page_tokens: int
    """Tokens of a page that is not slow; 0: the planned ones are not, or no page is."""


def no_tier(name: str) -> str:
    """Why pools of a family have none; empty if they may."""
    family = FAMILIES[name]
    return "there is no KV that could be kept" if family.is_mode else family.untiered


def pages_of_family(made: FamilyPlan) -> PlannedPages:
    """Those of the plan of a family that may have tiers."""
    kv = made.parts[0]
    # What goes in lockstep may have several pages for each of the first.
    n_bytes = sum(part.page_bytes * (kv.page_size // part.page_size) for part in made.parts)
    return PlannedPages(kv.page_size, n_bytes, kv.pages)


def pages_of_vllm(made: VllmPlan, block_size: int) -> PlannedPages:
    """Those of a pool for vLLM."""
    return PlannedPages(block_size, made.block_bytes, made.pages)


def _moving(pages: PlannedPages, usual: str) -> str:
    """As much as a daemon lets move, and no more than it does by itself; one page at least."""
    most = pages.n_bytes * pages.n_pages // TIER_SHARE
    moving = max(pages.n_bytes, min(size_bytes(usual) or 0, most))
    return f"{moving // 2**20}MiB" if moving % 2**20 == 0 else f"{-(-moving // 2**10)}KiB"


def disk_plan(pages: PlannedPages, size: str) -> DiskPlan:
    """The tier of that size.

    Raises:
        NotPlanned: it is too small.
    """
    max_moving = _moving(pages, DiskTierSection().max_moving)
    n_bytes = size_bytes(size) or 0
    if n_bytes < 2 * (size_bytes(max_moving) or 0):
        raise NotPlanned(
            f"--disk {size} is less than twice what moves at a time, which is {max_moving} here"
        )
    section: dict[str, Value] = {"directory": DIRECTORY, "size": size, "max_moving": max_moving}
    made = _tier_plan(pages, n_bytes, max_moving, {"tiers.disk": section})
    return DiskPlan(**asdict(made), quick_page_tokens=_quick_tokens(pages))


def store_plan(pages: PlannedPages, size: str) -> TierPlan:
    """A store whose own rules keep it at that size; where it listens nobody has said yet."""
    max_moving = _moving(pages, StoreTierSection().max_moving)
    sections: dict[str, dict[str, Value]] = {
        "cache": {"epochs_directory": EPOCHS_DIRECTORY},
        "tiers.store": {"endpoint": ENDPOINT, "bucket": BUCKET, "max_moving": max_moving},
    }
    return _tier_plan(pages, size_bytes(size) or 0, max_moving, sections)


def _tier_plan(
    pages: PlannedPages, n_bytes: int, max_moving: str, sections: Mapping[str, Mapping[str, Value]]
) -> TierPlan:
    """What fits into so many bytes, and the sections to paste."""
    one = object_bytes(pages.n_bytes)
    return TierPlan(
        page_bytes=pages.n_bytes,
        object_bytes=one,
        objects=n_bytes // one,
        tokens=n_bytes // one * pages.tokens,
        max_moving=max_moving,
        toml=as_file(sections),
    )


def _quick_tokens(pages: PlannedPages) -> int:
    """The next page that is as large as those that were quick, in doubles of the planned one."""
    tokens, n_bytes = pages.tokens, pages.n_bytes
    while n_bytes < QUICK_BYTES:
        tokens, n_bytes = 2 * tokens, 2 * n_bytes
    return tokens if pages.tokens < tokens <= MOST_PAGE_TOKENS else 0


def told_of_disk(made: DiskPlan, size: str, option: str) -> Iterator[str]:
    """In words; ``option`` is the one that says how many tokens a page has."""
    yield (
        f"a disk of {size} keeps {made.tokens} tokens below it: {made.objects} objects of "
        f"{amount(made.object_bytes)}, one for each page"
    )
    measured = " and ".join(
        f"{ratio:.2f} with {amount(n_bytes)}" for n_bytes, ratio in WRITTEN_OVER_BARE.items()
    )
    said = "    small pages are slow on a disk"
    if made.page_bytes >= QUICK_BYTES:
        said = "    these pages are large enough for a disk"
    quick = f"0.8 and more with {amount(QUICK_BYTES)}"
    said += f": of bare NIXL's speed writing has {measured}, {quick}"
    if made.quick_page_tokens:
        said += f"; {option} {made.quick_page_tokens} makes them so large"
    yield f"{said} (measured on one disk)"
    yield f"    to paste, below the pool:\n\n{made.toml}"


def told_of_store(made: TierPlan, size: str) -> Iterator[str]:
    """In words."""
    yield (
        f"a store of {size} keeps {made.tokens} tokens for all nodes that share it: "
        f"{made.objects} objects of {amount(made.object_bytes)}, one for each page"
    )
    yield (
        "    no node bounds it: its own rules do (kvd config lifecycle). Where it listens, its "
        "bucket, a prefix for these weights and a file with keys are yours to say"
    )
    yield f"    to paste, below the pool:\n\n{made.toml}"
