"""What a family is: one row of data with a few functions over its own section.

A row names the class of its ``[pool]`` section, makes the components of it, divides its memory, and
says what it cannot be combined with. ``kvd.config`` asks rows; nothing anywhere asks for a name.

What must not be here: anything about one family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

import msgspec

from kvd.core.layout.spec import Component, PoolSpec
from kvd.families.keys import PoolSection
from kvd.families.model import Model

Section = TypeVar("Section", bound=PoolSection)
Value = str | int | float | bool | tuple[str, ...] | dict[str, str] | None
"""Of a key."""


TextRule = Callable[[str], str | None]
"""What to do about a text that is not as it must be; None if it is."""


def text_rule(is_right: Callable[[str], bool], fix: str) -> TextRule:
    """The rule with one ``fix`` for whatever is not right."""
    return lambda text: None if is_right(text) else fix


class Breach(msgspec.Struct, frozen=True):
    """What a rule over several keys holds against ``key``, or one ``entry`` of a table."""

    key: str
    rule: str
    fix: str
    entry: str | None = None


class RefusedKey(msgspec.Struct, frozen=True):
    """A key that cannot be as it is, ``why``, and what to do about it short of leaving the family.

    ``allowed`` are the values that are well all the same; left out, so is only leaving it alone.
    """

    key: str
    why: str
    fix: str = "remove it"
    allowed: tuple[Value, ...] | None = None


class KeyGroup(msgspec.Struct, frozen=True):
    """Keys of ``PoolSection`` that several families have, and why the others do not.

    In ``why`` stand ``{having}`` for the families that have them, ``{needing}`` and ``{may}`` for
    those of them that need one and those that do not, ``{others}`` for the rest; ``{needing}`` and
    ``{others}`` with their verb, as in ``mla keeps``.
    """

    keys: tuple[str, ...]
    why: str


HEADS = KeyGroup(
    keys=("heads", "head_dim", "v_dim"),
    why="K and V per head are what {having} keep; {others} none",
)
LATENT = KeyGroup(
    keys=("latent_dim", "rope_dim"),
    why="{needing} latents, and {may} may; the others keep none",
)
ELEMENTS = KeyGroup(
    keys=("dtype", "interior"),
    why="{having} say what the elements of a page are and how they lie; {others} opaque bytes",
)
SCALE = KeyGroup(
    keys=("scale_dtype",),
    why="scales are kept in lockstep with the pages of kv, which {having} can do: those of a "
    "window or of a device buffer would need page ids of their own",
)
INDEX = KeyGroup(
    keys=("index_dim", "index_heads", "index_dtype", "index_page_size"),
    why="{having} may have an index; the other families have no sparse attention",
)
GROUPS = (HEADS, LATENT, ELEMENTS, SCALE, INDEX)


class PlanRequest(msgspec.Struct, frozen=True):
    """What is planned for. Sizes are texts like ``80GiB``; ``host_memory`` is for hisparse.

    ``memory`` is that of a node, and ``shards`` are keys of [pool] that say what it holds.
    """

    memory: str
    host_memory: str
    context_tokens: int
    page_size: int
    buffer_tokens: int
    dtype: str | None = None
    shards: dict[str, str | int] = {}


class PoolFamily(msgspec.Struct, Generic[Section], frozen=True, kw_only=True):
    """One family. Functions take its own section, of the class ``section``.

    ``components`` are what a sequence owns, the first of them ``kv``, as one shard has them.
    ``divide`` gives the pages of kv, and of what has a budget beside it (0 where there is none).
    """

    name: str
    owns: str
    """What a sequence owns of it, as the end of a sentence about ``pool.family``."""
    section: type[Section]
    components: Callable[[Section], tuple[Component, ...]]
    divide: Callable[[Section, tuple[Component, ...]], tuple[int, int]]
    """``kvd.families.budget`` has those of one budget and of two that run out together."""

    # ---- its keys ----
    groups: tuple[KeyGroup, ...] = ()
    """Keys of ``PoolSection`` that it may have, of those that not every family has."""
    alone: str = ""
    """What its own keys are about, as in: only <name> has <this>."""
    needs: Mapping[str, str] = {}
    """Keys without which it is none, each with what to write there."""
    texts: Mapping[str, TextRule] = {}
    """Of its own keys: what their texts must be, beyond their type."""
    entries: Mapping[str, TextRule] = {}
    """Of its own keys that are tables: what the names of entries must be."""
    second: str = ""
    """The key that gives the pages of what has a budget beside kv."""

    # ---- what it cannot ----
    flaws: Callable[[Section], Iterable[Breach]] | None = None
    """What is wrong with its own keys; rules over all keys are those of ``kvd.config``."""
    memory_flaws: Callable[[Section], Iterable[Breach]] | None = None
    """The same, asked only where all keys that make its components are sound."""
    without_layers: str = "nothing"
    """What would be left with ``pool.layers = 0``; empty where that is well."""
    refuses: tuple[RefusedKey, ...] = ()
    """Keys anywhere in the configuration that it cannot go with."""
    unkept: str = ""
    """Why its memory cannot outlive the daemon; empty where it can."""
    unsharded: str = ""
    """Why it cannot be cut into shards; empty where it can."""
    untiered: str = ""
    """Why its pages cannot lie in a tier below the pool; empty where they can."""
    uncounted: str = ""
    """Why it cannot do without its KV (prefill-only); empty where it can."""

    # ---- ``kvd config plan`` ----
    unsuited: Callable[[Model, str | None], str | None]
    """Why a model cannot be held in it; of those that the caller asked for, one by name."""
    plan_keys: Callable[[Model, PlanRequest], dict[str, Value]]
    """Its keys for a model, without the sizes of its memory."""
    plan_sizes: Callable[[Section, PlanRequest], dict[str, Value]] | None = None
    """Pages of each memory, where one size does not say it all."""
    plan_note: Callable[[Model, PoolSpec], str]
    """What an operator should know of such a pool."""
    is_full: bool = False
    """Whether it holds every token of every layer: what the others are compared with."""

    # ---- for tests, the demo and benchmarks ----
    shape: Mapping[str, Value]
    """Keys of [pool] of a small model: the least that is whole, and a few KiB a page."""
    with_sections: Mapping[str, Mapping[str, Value]] = {}
    """Keys of other sections that it takes, by section."""
    is_mode: bool = False
    """Whether it is no value of pool.family but a mode of the cache."""


def among(names: list[str]) -> str:
    """``mha, mla and hisparse``; nothing for none."""
    *first, last = names or [""]
    return f"{', '.join(first)} and {last}" if first else last
