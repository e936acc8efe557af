"""raw: bytes per page and layer, packed as the engine likes; kvd knows nothing of what they hold.

For engines whose kernels keep a packing of their own (quantised elements with their scales among
them, tiles, blocks of several tensors). Pages are sent whole: between nodes whose ranks are divided
alike, and never cut.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta
from typing_extensions import override

from kvd.core.layout.spec import Component, Device, Interior, Raw, shard_of
from kvd.families.budget import one_budget
from kvd.families.family import PoolFamily, text_rule
from kvd.families.keys import PoolSection, example, rule
from kvd.families.mha import full_note, plan_keys
from kvd.families.sharding import held

if TYPE_CHECKING:
    from kvd.families.model import Model

MAX_PAGE_BYTES = 2**30

_BYTES = re.compile(r"[1-9][0-9]{0,9}")
_NAME = re.compile(r"(?!kv$)[a-z][a-z0-9_]{0,31}")


class RawPool(PoolSection, frozen=True):
    """[pool] of this family."""

    page_bytes: Annotated[Annotated[int, Meta(ge=1, le=MAX_PAGE_BYTES)] | None, example(65536)] = (
        None
    )
    """raw: bytes of one page of one layer; where there are several ranks, of each of them."""
    components: Annotated[
        dict[str, str],
        rule('a table of NAME = "BYTES"'),
        example({"scale": "512"}),
    ] = msgspec.field(default_factory=dict)
    """raw: what goes in lockstep with each page beside its kv, as bytes of one page of one layer:
    memory of its own, which the engine sees by that name."""

    @property
    @override
    def model_heads(self) -> int:
        # What one rank has is in no other's, and no part of it is known: so a rank is one head.
        return self.tp_size


def _bytes(text: str) -> int | None:
    found = int(text) if _BYTES.fullmatch(text) else 0
    return found if 0 < found <= MAX_PAGE_BYTES else None


def _component(pool: RawPool, name: str, n_bytes: int, ranks: int = 1) -> Component:
    return Component(
        name,
        layers=pool.layers,
        layout=Raw(n_bytes, ranks),
        page_size=pool.page_size,
        tier=Device(pool.device),
        interior=Interior.OPAQUE,
    )


def _components(pool: RawPool) -> tuple[Component, ...]:
    first = _component(pool, "kv", pool.page_bytes or 0, pool.tp_size)
    here = held(pool)
    if here is not None:
        first = shard_of(first, here.shards[0])
    beside = [
        (name, n_bytes) for name, text in pool.components.items() if (n_bytes := _bytes(text))
    ]
    return (first, *(_component(pool, name, n_bytes) for name, n_bytes in sorted(beside)))


def _unsuited(_model: Model, _asked: str | None) -> str | None:
    return (
        "how many bytes an engine packs into a page is in no model's configuration; for vLLM's "
        "blocks see kvd config plan --engine vllm"
    )


FAMILY = PoolFamily(
    name="raw",
    owns="bytes that the engine packs",
    section=RawPool,
    components=_components,
    divide=one_budget,
    alone="pages of bytes without a shape",
    needs={"page_bytes": "the bytes of one page of one layer, like 65536"},
    texts={
        "components": text_rule(
            lambda text: _bytes(text) is not None, "write the bytes of one page of one layer"
        )
    },
    entries={
        "components": text_rule(
            lambda name: _NAME.fullmatch(name) is not None,
            "name what it holds, like scale; kv is there already",
        )
    },
    uncounted="what its pages hold is the engine's, and would be nowhere",
    unsuited=_unsuited,
    plan_keys=plan_keys,
    plan_note=full_note,
    shape={"layers": 2, "page_bytes": 512},
)
