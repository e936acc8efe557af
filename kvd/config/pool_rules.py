"""What a pool cannot be combined with, and why; and whether its pages fit its memory.

Nothing is half supported: what a family, a mode of the cache, shards or memory that outlives its
daemon cannot do is refused here, each thing with its reason and a way out. Families say theirs in
``kvd.families``; this file asks all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from kvd.config.keys import KEYS, value_of
from kvd.config.pool import (
    BELONGS,
    components,
    counts_of,
    family_of,
    is_given,
    missing,
    reason_out_of_place,
)
from kvd.config.schema import Config
from kvd.core.layout.page_sizes import companion_flaw
from kvd.core.layout.shards import MAX_SHARDS
from kvd.core.layout.spec import Buffer, page_bytes
from kvd.families import FAMILIES, POOLS, Breach
from kvd.families.budget import beside, block_bytes, least_pages
from kvd.families.family import among
from kvd.families.keys import MAX_PAGES
from kvd.families.prefill_only import PREFILL_ONLY
from kvd.families.sharding import (
    SHARD_KEYS,
    held,
    layers_here,
    ranks_here,
    shard_count,
)
from kvd.types import amount

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.core.layout.spec import Component
    from kvd.families import RefusedKey


Check = Callable[[Config], "Iterable[Breach]"]


class KeyRule(msgspec.Struct, frozen=True):
    """``check`` reads the whole configuration; it is skipped where a key in ``needs`` is wrong.

    Other keys that are wrong have their defaults while it is asked.
    """

    check: Check
    needs: frozenset[str]


RULES: list[KeyRule] = []
"""Every rule over several keys, in the order in which they are asked: that of their declaration."""


def over(*needs: str) -> Callable[[Check], Check]:
    """Declare a rule that reads these keys."""

    def declared(check: Check) -> Check:
        RULES.append(KeyRule(check, frozenset(needs)))
        return check

    return declared


def _pool(*names: str) -> tuple[str, ...]:
    return tuple(f"pool.{name}" for name in names)


_FAMILY = _pool("family", "layers", *BELONGS)
_POOL = (
    *_FAMILY,
    *_pool("page_size", "pages", "size", "typical_tokens", *SHARD_KEYS),
)

_INDEX_EXAMPLE = {
    "latent_dim": "the model's kv_lora_rank, like 512",
    "index_dim": "the elements of one key of the index, like 128",
}


# ---- the keys of a family ------------------------------------------------------------------------


@over(*_FAMILY, "cache.mode")
def _needed(config: Config) -> Iterator[Breach]:
    """A family without its own keys is none; where it is refused as a whole that says enough."""
    if config.cache.mode == PREFILL_ONLY:
        return
    # Of a key that a shared one calls for; a family that needs it itself says it in its own words.
    needs = {**_INDEX_EXAMPLE, **family_of(config.pool).needs}
    for name, caller in missing(config.pool):
        yield Breach(f"pool.{caller}", f"needs pool.{name}: {needs[name]}", f"set pool.{name}")


@over(*_pool("family", "layers"))
def _out_of_place(config: Config) -> Iterator[Breach]:
    """A key that this family does not have was meant for another one."""
    for name in (*BELONGS, "page_size"):
        key = f"pool.{name}"
        why = reason_out_of_place(config, name)
        if why is None or not is_given(config, key):
            continue
        if name == "page_size" and config.pool.page_size == 1:
            continue
        rule = f"says nothing in family {config.pool.family}: {why}"
        if KEYS[key].default == {}:
            entry = next(path for path in config.origins if path.startswith(f"{key}."))
            fix = "remove the table, or set pool.family"
            yield Breach(key, rule, fix, entry=entry.removeprefix(f"{key}."))
        else:
            yield Breach(key, rule, "remove it, or set pool.family")


@over(*_pool("family", "page_size"))
def _flaws(config: Config) -> Iterator[Breach]:
    """Every page is a whole part of the page that is matched; and what its family says."""
    pool, own = config.pool, family_of(config.pool).flaws
    if pool.index_page_size is not None:
        why = companion_flaw(pool.page_size, pool.index_page_size)
        if why is not None:
            rule = f"must divide pool.page_size: {why}"
            yield Breach("pool.index_page_size", rule, "leave it out, or choose a divisor")
    if own is not None:
        yield from own(pool)


@over(*_pool("family", "latent_dim", "interior"))
def _interior(config: Config) -> Iterator[Breach]:
    """Of one head both orders are the same bytes, and would still be told apart."""
    if config.pool.keeps_latents and config.pool.interior == "hnd":
        rule = "is refused for latents, which have no heads that could come before their tokens"
        yield Breach("pool.interior", rule, 'leave it out, or set "opaque"')


@over(*_pool("family", "layers"))
def _layers(config: Config) -> Iterator[Breach]:
    """Tokens have KV somewhere, unless a state is all there is."""
    left = family_of(config.pool).without_layers
    if not config.pool.layers and left:
        without = among([name for name, row in POOLS.items() if not row.without_layers])
        rule = f"leaves {left}: only {without} can do without a layer that has KV of every token"
        yield Breach("pool.layers", rule, "give at least 1")


# ---- what cannot be together ---------------------------------------------------------------------


def _refuse(row: RefusedKey, key: str, value: str, *, mode: str, leave: str) -> None:
    """Declare that the key of ``row`` must be as it says where ``key`` has that ``value``.

    ``mode`` is how both are told, ``leave`` the other way out.
    """
    rule, fix = f"is refused with {mode}: {row.why}", f"{row.fix}, or {leave}"

    @over(key, row.key)
    def _refused(config: Config) -> Iterator[Breach]:
        found = value_of(config, KEYS[row.key])
        if value_of(config, KEYS[key]) != value:
            return
        if isinstance(found, dict):
            yield from (Breach(row.key, rule, fix, entry=entry) for entry in found)
        elif is_given(config, row.key) if row.allowed is None else found not in row.allowed:
            # radix.policy has a default even where nothing is cached: only who writes it is told.
            yield Breach(row.key, rule, fix)


for _name, _family in POOLS.items():
    for _row in _family.refuses:
        _mode = f"pool.family = {_name}"
        _refuse(_row, "pool.family", _name, mode=_mode, leave="choose another family")


@over("engine.chunk_tokens")
def _chunks(config: Config) -> Iterator[Breach]:
    if config.engine.chunk_tokens == 0:
        rule = "must be -1, or a whole number from 1 to 268435456"
        yield Breach("engine.chunk_tokens", rule, "the default is -1, the whole prompt")


@over("cache.mode", "radix.policy")
def _off(config: Config) -> Iterator[Breach]:
    """Where nothing is cached nothing gives way."""
    if config.cache.mode == "off" and is_given(config, "radix.policy"):
        rule = 'says nothing with cache.mode = "off": nothing is cached, so nothing gives way'
        yield Breach("radix.policy", rule, 'remove it, or set cache.mode = "radix"')


# ---- memory --------------------------------------------------------------------------------------


def _parts(config: Config) -> tuple[Component, ...]:
    """The components; none while the keys that make them are not complete or contradict."""
    # Components of incomplete keys would be judged by zeros, and told in numbers nobody chose.
    is_unsound = missing(config.pool) or any(_flaws(config)) or any(_layers(config))
    return () if is_unsound else components(config.pool)


@over(*_POOL)
def _memory_flaws(config: Config) -> Iterable[Breach]:
    """What the family says of components that could be made."""
    own = family_of(config.pool).memory_flaws
    return own(config.pool) if own is not None and _parts(config) else ()


@over(*_POOL)
def _pool_fits(config: Config) -> Iterator[Breach]:
    """Where kv is all there is, it needs its null page and one more."""
    parts, pool = _parts(config), config.pool
    if not parts or beside(parts) is not None or pool.pages is not None:
        return
    n_shards = shard_count(pool)
    block = block_bytes(parts, n_shards)
    if counts_of(pool, parts)[0] < 2:
        rule = f"must hold at least 2 pages, and one page of this pool takes {amount(block)}"
        if n_shards > 1:
            rule += f" in its {n_shards} shards"
        yield Breach("pool.size", rule, f"give at least {-(-2 * block // 1024)}KiB")


@over(*_POOL)
def _both_fit(config: Config) -> Iterator[Breach]:
    """Where there are two budgets, each has room for one request."""
    parts, pool = _parts(config), config.pool
    other = beside(parts)
    if other is None:
        return
    key = f"pool.{family_of(pool).second}"
    given = value_of(config, KEYS[key])
    least = least_pages(other)
    counts = counts_of(pool, parts)
    first, second = counts[0], counts[parts.index(other)]
    if second < least and second == given:
        rule = f"must hold one request: {least} pages of {other.name}, the null page included"
        yield Breach(key, rule, f"give at least {least}")
    elif first >= 2 and second >= least:
        return
    elif pool.pages is not None:
        rule = f"leaves {second} pages of {other.name}, and one request takes {least}"
        yield Breach("pool.pages", rule, f"give more, or set {key}")
    else:
        block, least = block_bytes(parts), given if isinstance(given, int) else least
        needed = 2 * block
        if not isinstance(other.extent, Buffer):  # which lies in other memory than pool.size
            needed += least * page_bytes(other)
        rule = (
            f"must hold at least 2 pages of kv ({amount(block)} each) and {least} of {other.name} "
            f"({amount(page_bytes(other))} each)"
        )
        yield Breach("pool.size", rule, f"give at least {-(-needed // 1024)}KiB, or set {key}")


@over(*_POOL)
def _page_ids_fit(config: Config) -> Iterator[Breach]:
    """Page ids travel as int32."""
    parts = _parts(config)
    count = max(counts_of(config.pool, parts)) if parts else 0
    if count > MAX_PAGES:
        key = "pool.size" if config.pool.pages is None else "pool.pages"
        rule = f"makes {count} pages, and page ids end at {MAX_PAGES}"
        yield Breach(key, rule, "give less memory or a larger pool.page_size")


# ---- shards: more or less than the whole model in one --------------------------------------------
# Built for pages of one kind, cut across layers and heads.

_WHOLE = "or hold the whole model in one shard"


@over(*_pool("tp_size", "heads", "family", "latent_dim"))
def _heads(config: Config) -> Iterator[Breach]:
    """Every rank has equally many heads, or every head equally many ranks."""
    heads, size = config.pool.model_heads, config.pool.tp_size
    if heads % size and size % heads:
        fitting = [n for n in range(1, 2 * max(heads, size)) if not (heads % n and n % heads)]
        near = min(fitting, key=lambda n: (abs(n - size), n))
        rule = f"divides no {heads} heads (pool.heads) evenly: one number must divide the other"
        yield Breach("pool.tp_size", rule, f"the nearest that does is {near}")


@over(*_pool("tp_ranks", "tp_size"))
def _ranks(config: Config) -> Iterator[Breach]:
    """The ranks of this node are some of all."""
    size = config.pool.tp_size
    if ranks_here(config.pool)[1] > size:
        rule = f"must be ranks from 0 to {size - 1}: there are {size} (pool.tp_size)"
        yield Breach("pool.tp_ranks", rule, "name those of this node, or raise pool.tp_size")


@over(*_pool("stage", "layers"))
def _stage(config: Config) -> Iterator[Breach]:
    """The layers of this node are some of the model's."""
    layers = config.pool.layers
    if layers_here(config.pool)[1] > layers:
        rule = f"must end at {layers} or before: the model has so many layers (pool.layers)"
        yield Breach("pool.stage", rule, "pool.layers is of the whole model, not of this stage")


@over(*_pool("tp_ranks", "tp_size", "replicas"))
def _many(config: Config) -> Iterator[Breach]:
    n_shards = shard_count(config.pool)
    if n_shards > MAX_SHARDS:
        rule = f"makes {n_shards} shards on this node, at most {MAX_SHARDS} are held"
        key = "pool.replicas" if config.pool.replicas > 1 else "pool.tp_ranks"
        yield Breach(key, rule, "name the ranks of this node in pool.tp_ranks")


@over(*_pool("heads", "layers", "family", "latent_dim", *SHARD_KEYS))
def _sharded(config: Config) -> Iterator[Breach]:
    pool = config.pool
    if held(pool) is None:
        return
    # The key that makes this pool a sharded one: the first that somebody wrote.
    names = _pool(*SHARD_KEYS)
    key = next((name for name in names if is_given(config, name)), names[0])
    head = f"is refused with {key}"
    if why := family_of(pool).unsharded:
        can = among([name for name, row in POOLS.items() if not row.unsharded])
        rule = f"is refused with pool.family = {pool.family}: {why}; only {can} are cut into shards"
        yield Breach(key, rule, f"remove it, {_WHOLE}")
    why = "it makes a component beside kv, and only pools of one component are cut into shards"
    for name, entry in _beside(config):
        yield Breach(name, f"{head}: {why}", f"remove it, {_WHOLE}", entry=entry)
    if config.cache.mode == PREFILL_ONLY:
        rule = f'is refused with cache.mode = "{PREFILL_ONLY}": there is no KV that could be cut'
        yield Breach(key, rule, "remove it: tokens are counted once for all ranks")
    if pool.is_kept:
        why = (
            "checksums of kept pages are of one shard, so the next daemon could not prove the "
            "others"
        )
        yield Breach("pool.backing", f"{head}: {why}", f'set "anon", {_WHOLE}')


def _beside(config: Config) -> list[tuple[str, str | None]]:
    """The keys that make a component beside kv, of those that are set; of a table each entry."""
    found: list[tuple[str, str | None]] = []
    for key in _pool("index_dim", "scale_dtype", "components"):
        value = value_of(config, KEYS[key])
        if isinstance(value, dict):
            found += [(key, entry) for entry in value]
        elif value is not None:
            found.append((key, None))
    return found


# ---- no KV at all --------------------------------------------------------------------------------


@over("cache.mode", "pool.family")
def _uncounted(config: Config) -> Iterator[Breach]:
    """Families that cannot do without their KV."""
    why = family_of(config.pool).uncounted
    if why and config.cache.mode == PREFILL_ONLY:
        can = " or ".join(name for name, row in POOLS.items() if not row.uncounted)
        rule = f'is refused with cache.mode = "{PREFILL_ONLY}": {why}'
        yield Breach("pool.family", rule, f'write {can}, or set cache.mode = "radix"')


for _row in FAMILIES[PREFILL_ONLY].refuses:
    _mode = f'cache.mode = "{PREFILL_ONLY}"'
    _refuse(_row, "cache.mode", PREFILL_ONLY, mode=_mode, leave='set cache.mode = "radix"')


# ---- memory that outlives the daemon: pool.backing other than anon -------------------------------
# The next daemon believes a page if the journal says which tokens it holds and its checksum is
# right. That is built for pages of one kind, each of which stands for itself.

_ONLY = "only pools with one whole component can be adopted"
_ANON = 'or set pool.backing = "anon"'
_MODES = {
    "off": "nothing is cached, so there is nothing to adopt",
    PREFILL_ONLY: "there is no KV, so there is nothing to adopt",
}


@over("pool.backing")
def _kept(config: Config) -> Iterator[Breach]:
    pool = config.pool
    if not pool.is_kept:
        return
    head = f"is refused with pool.backing = {pool.backing}"
    if why := family_of(pool).unkept:
        can = " or ".join(name for name, row in POOLS.items() if not row.unkept)
        yield Breach("pool.family", f"{head}: {why}; {_ONLY}", f"write {can}, {_ANON}")
    for name, entry in _beside(config):
        why = "it makes a component beside kv, of which no checksums are kept"
        yield Breach(name, f"{head}: {why}; {_ONLY}", f"remove it, {_ANON}", entry=entry)
    if why := _MODES.get(config.cache.mode, ""):
        rule = f"is refused with cache.mode = {config.cache.mode}: {why}"
        yield Breach("pool.backing", rule, 'set "anon", or set cache.mode = "radix"')
    if pool.device != "cpu":
        why = "memory of a device is of the process that allocated it, and ends with it"
        yield Breach("pool.device", f"{head}: {why}", f'write "cpu", {_ANON}')


@over(*_pool("backing", "directory"))
def _directory(config: Config) -> Iterator[Breach]:
    pool = config.pool
    if pool.directory is not None and not pool.is_in_files:
        rule = f"says nothing with pool.backing = {pool.backing}, which has no files"
        yield Breach("pool.directory", rule, 'remove it, or set pool.backing = "shm"')
