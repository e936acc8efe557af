"""What a pool cannot be combined with, and why; and whether its pages fit its memory.

Nothing is half supported: what a family, a mode of the cache, shards or memory that outlives its
daemon cannot do is refused here, each thing with its reason and a way out. Families say theirs in
``kvd.families``; this file asks all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable
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
    model_heads,
    ranks_here,
    shard_count,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.core.layout.spec import Component
    from kvd.families import RefusedKey


class KeyRule(msgspec.Struct, frozen=True):
    """``check`` reads the whole configuration; it is skipped where a key in ``needs`` is wrong.

    Other keys that are wrong have their defaults while it is asked.
    """

    check: Callable[[Config], list[Breach]]
    needs: frozenset[str]


_INDEX_EXAMPLE = {
    "latent_dim": "the model's kv_lora_rank, like 512",
    "index_dim": "the elements of one key of the index, like 128",
}


# ---- the keys of a family ------------------------------------------------------------------------


def _needed(config: Config) -> list[Breach]:
    """A family without its own keys is none; where it is refused as a whole that says enough."""
    if config.cache.mode == PREFILL_ONLY:
        return []
    out = []
    # Of a key that a shared one calls for; a family that needs it itself says it in its own words.
    needs = {**_INDEX_EXAMPLE, **family_of(config.pool).needs}
    for name, caller in missing(config.pool):
        rule = f"needs pool.{name}: {needs[name]}"
        out.append(Breach(f"pool.{caller}", rule, f"set pool.{name}"))
    return out


def _out_of_place(config: Config) -> list[Breach]:
    """A key that this family does not have was meant for another one."""
    out = []
    for name in (*BELONGS, "dtype", "page_size"):
        key = f"pool.{name}"
        why = reason_out_of_place(config, name)
        if why is None or not is_given(config, key):
            continue
        if name == "page_size" and config.pool.page_size == 1:
            continue
        rule = f"says nothing in family {config.pool.family}: {why}"
        if KEYS[key].default == {}:
            entries = [path for path in config.origins if path.startswith(f"{key}.")]
            entry = entries[0].removeprefix(f"{key}.")
            out.append(
                Breach(key=key, rule=rule, fix="remove the table, or set pool.family", entry=entry)
            )
        else:
            out.append(Breach(key, rule, "remove it, or set pool.family"))
    return out


def _flaws(config: Config) -> list[Breach]:
    """Every page is a whole part of the page that is matched; and what its family says."""
    pool, own = config.pool, family_of(config.pool).flaws
    out = []
    if pool.index_page_size is not None:
        why = companion_flaw(pool.page_size, pool.index_page_size)
        if why is not None:
            rule = f"must divide pool.page_size: {why}"
            fix = "leave it out, or choose a divisor"
            out.append(Breach("pool.index_page_size", rule, fix))
    return out + (own(pool) if own is not None else [])


def _layers(config: Config) -> list[Breach]:
    """Tokens have KV somewhere, unless a state is all there is."""
    left = family_of(config.pool).without_layers
    if config.pool.layers or not left:
        return []
    without = among([name for name, row in POOLS.items() if not row.without_layers])
    rule = f"leaves {left}: only {without} can do without a layer that has KV of every token"
    return [Breach("pool.layers", rule, "give at least 1")]


# ---- what cannot be together ---------------------------------------------------------------------


def _refusals(config: Config, rows: Iterable[RefusedKey], mode: str) -> list[Breach]:
    """The keys of ``rows`` that are not as they must be with ``mode``."""
    out = []
    for row in rows:
        value = value_of(config, KEYS[row.key])
        rule = f"is refused with {mode}: {row.why}"
        if isinstance(value, dict):
            out += [Breach(key=row.key, rule=rule, fix=row.fix, entry=entry) for entry in value]
        elif is_given(config, row.key) if row.allowed is None else value not in row.allowed:
            # radix.policy has a default even where nothing is cached: only who writes it is told.
            out.append(Breach(row.key, rule, row.fix))
    return out


def _refused(row: RefusedKey, mode: str, is_on: Callable[[Config], bool], *needs: str) -> KeyRule:
    def judged(config: Config) -> list[Breach]:
        return _refusals(config, [row], mode) if is_on(config) else []

    return KeyRule(judged, frozenset({*needs, row.key}))


def _by_family(name: str) -> Callable[[Config], bool]:
    return lambda config: config.pool.family == name


def _is_counted(config: Config) -> bool:
    return config.cache.mode == PREFILL_ONLY


_OF_FAMILIES = [
    _refused(row, f"pool.family = {name}", _by_family(name), "pool.family")
    for name, family in POOLS.items()
    for row in family.refuses
]
_OF_PREFILL_ONLY = [
    _refused(row, f'cache.mode = "{PREFILL_ONLY}"', _is_counted, "cache.mode")
    for row in FAMILIES[PREFILL_ONLY].refuses
]


def _uncounted(config: Config) -> list[Breach]:
    """Families that cannot do without their KV."""
    why = family_of(config.pool).uncounted
    if not why or config.cache.mode != PREFILL_ONLY:
        return []
    can = [name for name, row in POOLS.items() if not row.uncounted]
    rule = f'is refused with cache.mode = "{PREFILL_ONLY}": {why}'
    return [Breach("pool.family", rule, f'write {" or ".join(can)}, or set cache.mode = "radix"')]


def _off(config: Config) -> list[Breach]:
    """Where nothing is cached nothing gives way."""
    if config.cache.mode != "off" or not is_given(config, "radix.policy"):
        return []
    rule = 'says nothing with cache.mode = "off": nothing is cached, so nothing gives way'
    return [Breach("radix.policy", rule, 'remove it, or set cache.mode = "radix"')]


def _chunks(config: Config) -> list[Breach]:
    if config.engine.chunk_tokens != 0:
        return []
    rule = "must be -1, or a whole number from 1 to 268435456"
    return [Breach("engine.chunk_tokens", rule, "the default is -1, the whole prompt")]


# ---- memory that outlives the daemon: pool.backing other than anon -------------------------------
# The next daemon believes a page if the journal says which tokens it holds and its checksum is
# right. That is built for pages of one kind, each of which stands for itself.

_ONLY = "only pools with one whole component can be adopted"
_ANON = 'or set pool.backing = "anon"'
_MODES = {
    "off": "nothing is cached, so there is nothing to adopt",
    PREFILL_ONLY: "there is no KV, so there is nothing to adopt",
}


def _kept(config: Config) -> list[Breach]:
    pool = config.pool
    if not pool.is_kept:
        return []
    out = []
    head = f"is refused with pool.backing = {pool.backing}"
    if why := family_of(pool).unkept:
        can = " or ".join(name for name, row in POOLS.items() if not row.unkept)
        out.append(Breach("pool.family", f"{head}: {why}; {_ONLY}", f"write {can}, {_ANON}"))
    for name in ("index_dim", "scale_dtype"):
        if value_of(config, KEYS[f"pool.{name}"]) is not None:
            why = "it makes a component beside kv, of which no checksums are kept"
            out.append(Breach(f"pool.{name}", f"{head}: {why}; {_ONLY}", f"remove it, {_ANON}"))
    if why := _MODES.get(config.cache.mode, ""):
        rule = f"is refused with cache.mode = {config.cache.mode}: {why}"
        out.append(Breach("pool.backing", rule, 'set "anon", or set cache.mode = "radix"'))
    if pool.device != "cpu":
        why = "memory of a device is of the process that allocated it, and ends with it"
        out.append(Breach("pool.device", f"{head}: {why}", f'write "cpu", {_ANON}'))
    return out


def _directory(config: Config) -> list[Breach]:
    pool = config.pool
    if pool.directory is None or pool.is_in_files:
        return []
    rule = f"says nothing with pool.backing = {pool.backing}, which has no files"
    return [Breach("pool.directory", rule, 'remove it, or set pool.backing = "shm"')]


# ---- shards: more or less than the whole model in one --------------------------------------------
# Built for pages of one kind, cut across layers and heads.

_WHOLE = "or hold the whole model in one shard"


def _heads(config: Config) -> list[Breach]:
    """Every rank has equally many heads, or every head equally many ranks."""
    heads, size = model_heads(config.pool), config.pool.tp_size
    if not (heads % size and size % heads):
        return []
    fitting = [n for n in range(1, 2 * max(heads, size)) if not (heads % n and n % heads)]
    near = min(fitting, key=lambda n: (abs(n - size), n))
    rule = f"divides no {heads} heads (pool.heads) evenly: one number must divide the other"
    return [Breach("pool.tp_size", rule, f"the nearest that does is {near}")]


def _ranks(config: Config) -> list[Breach]:
    """The ranks of this node are some of all."""
    size, (_, end) = config.pool.tp_size, ranks_here(config.pool)
    if end <= size:
        return []
    rule = f"must be ranks from 0 to {size - 1}: there are {size} (pool.tp_size)"
    return [Breach("pool.tp_ranks", rule, "name those of this node, or raise pool.tp_size")]


def _stage(config: Config) -> list[Breach]:
    """The layers of this node are some of the model's."""
    layers, (_, end) = config.pool.layers, layers_here(config.pool)
    if end <= layers:
        return []
    rule = f"must end at {layers} or before: the model has so many layers (pool.layers)"
    return [Breach("pool.stage", rule, "pool.layers is of the whole model, not of this stage")]


def _many(config: Config) -> list[Breach]:
    n_shards = shard_count(config.pool)
    if n_shards <= MAX_SHARDS:
        return []
    rule = f"makes {n_shards} shards on this node, at most {MAX_SHARDS} are held"
    key = "pool.replicas" if config.pool.replicas > 1 else "pool.tp_ranks"
    return [Breach(key, rule, "name the ranks of this node in pool.tp_ranks")]


def _sharded(config: Config) -> list[Breach]:
    pool = config.pool
    if held(pool) is None:
        return []
    # The key that makes this pool a sharded one: the first that somebody wrote.
    names = [f"pool.{name}" for name in SHARD_KEYS]
    key = next((name for name in names if is_given(config, name)), names[0])
    out = []
    if why := family_of(pool).unsharded:
        can = among([name for name, row in POOLS.items() if not row.unsharded])
        rule = f"is refused with pool.family = {pool.family}: {why}; only {can} are cut into shards"
        out.append(Breach(key, rule, f"remove it, {_WHOLE}"))
    for name in ("index_dim", "scale_dtype"):
        if value_of(config, KEYS[f"pool.{name}"]) is not None:
            rule = (
                f"is refused with {key}: it makes a component beside kv, and only pools of one "
                "component are cut into shards"
            )
            out.append(Breach(f"pool.{name}", rule, f"remove it, {_WHOLE}"))
    if config.cache.mode == PREFILL_ONLY:
        rule = f'is refused with cache.mode = "{PREFILL_ONLY}": there is no KV that could be cut'
        out.append(Breach(key, rule, "remove it: tokens are counted once for all ranks"))
    if pool.is_kept:
        rule = (
            f"is refused with {key}: checksums of kept pages are of one shard, so the next daemon "
            "could not prove the others"
        )
        out.append(Breach("pool.backing", rule, f'set "anon", {_WHOLE}'))
    return out


# ---- memory --------------------------------------------------------------------------------------


def _parts(config: Config) -> tuple[Component, ...]:
    """The components; none while the keys that make them are not complete or contradict."""
    # Components of incomplete keys would be judged by zeros, and told in numbers nobody chose.
    is_sound = not missing(config.pool) and not _flaws(config) and not _layers(config)
    return components(config.pool) if is_sound else ()


def _memory_flaws(config: Config) -> list[Breach]:
    """What the family says of components that could be made."""
    own = family_of(config.pool).memory_flaws
    return own(config.pool) if own is not None and _parts(config) else []


def _pool_fits(config: Config) -> list[Breach]:
    """Where kv is all there is, it needs its null page and one more."""
    parts, pool = _parts(config), config.pool
    if not parts or beside(parts) is not None or pool.pages is not None:
        return []
    n_shards = shard_count(pool)
    block = block_bytes(parts, n_shards)
    if counts_of(pool, parts)[0] >= 2:
        return []
    rule = f"must hold at least 2 pages, and one page of this pool takes {block} bytes"
    if n_shards > 1:
        rule += f" in its {n_shards} shards"
    return [Breach("pool.size", rule, f"give at least {-(-2 * block // 1024)}KiB")]


def _both_fit(config: Config) -> list[Breach]:
    """Where there are two budgets, each has room for one request."""
    parts, pool = _parts(config), config.pool
    other = beside(parts)
    if other is None:
        return []
    key = f"pool.{family_of(pool).second}"
    given = value_of(config, KEYS[key])
    least = least_pages(other)
    counts = counts_of(pool, parts)
    first, second = counts[0], counts[parts.index(other)]
    if second < least and second == given:
        rule = f"must hold one request: {least} pages of {other.name}, the null page included"
        return [Breach(key, rule, f"give at least {least}")]
    if first >= 2 and second >= least:
        return []
    if pool.pages is not None:
        rule = f"leaves {second} pages of {other.name}, and one request takes {least}"
        return [Breach("pool.pages", rule, f"give more, or set {key}")]
    block, least = block_bytes(parts), given if isinstance(given, int) else least
    needed = 2 * block
    if not isinstance(other.extent, Buffer):  # which lies in other memory than pool.size
        needed += least * page_bytes(other)
    rule = (
        f"must hold at least 2 pages of kv ({block} bytes each) and {least} of {other.name} "
        f"({page_bytes(other)} bytes each)"
    )
    return [Breach("pool.size", rule, f"give at least {-(-needed // 1024)}KiB, or set {key}")]


def _page_ids_fit(config: Config) -> list[Breach]:
    """Page ids travel as int32."""
    parts = _parts(config)
    if not parts:
        return []
    count = max(counts_of(config.pool, parts))
    if count <= MAX_PAGES:
        return []
    key = "pool.size" if config.pool.pages is None else "pool.pages"
    rule = f"makes {count} pages, and page ids end at {MAX_PAGES}"
    return [Breach(key, rule, "give less memory or a larger pool.page_size")]


def _pool(*names: str) -> frozenset[str]:
    return frozenset(f"pool.{name}" for name in names)


_FAMILY = _pool("family", "layers", *BELONGS)
_POOL = _FAMILY | _pool("dtype", "page_size", "pages", "size", "typical_tokens", *SHARD_KEYS)

POOL_RULES = (
    KeyRule(_needed, _FAMILY | {"cache.mode"}),
    KeyRule(_out_of_place, _pool("family", "layers")),
    KeyRule(_flaws, _pool("family", "page_size")),
    KeyRule(_layers, _pool("family", "layers")),
    *_OF_FAMILIES,
    KeyRule(_chunks, frozenset({"engine.chunk_tokens"})),
    KeyRule(_off, frozenset({"cache.mode", "radix.policy"})),
    *[KeyRule(one, _POOL) for one in (_memory_flaws, _pool_fits, _both_fit, _page_ids_fit)],
    KeyRule(_heads, _pool("tp_size", "heads", "family", "latent_dim")),
    KeyRule(_ranks, _pool("tp_ranks", "tp_size")),
    KeyRule(_stage, _pool("stage", "layers")),
    KeyRule(_many, _pool("tp_ranks", "tp_size", "replicas")),
    KeyRule(_sharded, _pool("heads", "layers", "family", "latent_dim", *SHARD_KEYS)),
    KeyRule(_uncounted, frozenset({"cache.mode", "pool.family"})),
    *_OF_PREFILL_ONLY,
    KeyRule(_kept, _pool("backing")),
    KeyRule(_directory, _pool("backing", "directory")),
)
"""Rules over [pool] and what is done on it."""
