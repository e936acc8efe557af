"""What a pool family cannot be combined with, and why; and whether its pages fit its memory.

Nothing is half supported: what a family cannot do is refused here, each thing with its reason and a
way out. What cache.mode = "prefill-only" rules out is ``prefill_only_rules``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.config.families import BELONGS, is_given, missing, reason_out_of_place
from kvd.config.finding import Finding, Rule
from kvd.config.pool import PREFILL_ONLY, components
from kvd.config.pool_pages import (
    MAX_PAGES,
    SECOND,
    beside,
    block_bytes,
    least_pages,
    page_counts,
    second_budget,
)
from kvd.config.sharding import KEYS, shard_count
from kvd.core.layout.geometry import misplaced
from kvd.core.layout.spec import Buffer, PerRequest, page_bytes

if TYPE_CHECKING:
    from kvd.config.schema import Config
    from kvd.core.layout.spec import Component

_EXAMPLES = {
    "latent_dim": "the model's kv_lora_rank, like 512",
    "window_tokens": "the model's sliding_window, like 1024",
    "window_layers": "how many of its layers slide",
    "buffer_tokens": "what the device holds of one request, like 4096: without it there is nowhere "
    "to compute on",
    "state_layers": "how many of its layers have a state",
    "state": 'the tensors of one layer, like ssm = "float32[64,64,128]"',
    "index_dim": "the elements of one key of the index, like 128",
}


def _needed(config: Config) -> list[Finding]:
    """A family without its own keys is none; where it is refused as a whole that says enough."""
    if config.cache.mode == PREFILL_ONLY:
        return []
    out = []
    for name, caller in missing(config.pool):
        rule = f"needs pool.{name}: {_EXAMPLES[name]}"
        out.append(Finding(f"pool.{caller}", rule, f"set pool.{name}"))
    return out


def _out_of_place(config: Config) -> list[Finding]:
    """A key that this family does not have was meant for another one."""
    out = []
    for name in (*BELONGS, "dtype", "page_size"):
        key = f"pool.{name}"
        why = reason_out_of_place(config, name)
        if why is None or not is_given(config, key):
            continue
        if name == "page_size" and config.pool.page_size == 1:
            continue
        if name == "state":
            entries = tuple(config.pool.state)
            fix = "remove the table, or set pool.family"
            rule = f"says nothing in family {config.pool.family}: {why}"
            out += [Finding(key, rule, fix, entry) for entry in entries[:1]]
            continue
        rule = f"says nothing in family {config.pool.family}: {why}"
        out.append(Finding(key, rule, "remove it, or set pool.family"))
    return out


def _page_sizes(config: Config) -> list[Finding]:
    """Every page is a whole part of the page that is matched."""
    pool = config.pool
    page = pool.page_size
    out = []
    if pool.index_page_size is not None and page % pool.index_page_size:
        rule = (
            f"must divide pool.page_size: pages of {page} tokens are no whole number of pages of "
            f"{pool.index_page_size}"
        )
        out.append(Finding("pool.index_page_size", rule, "leave it out, or choose a divisor"))
    if pool.buffer_tokens is not None and pool.buffer_tokens % page:
        rule = f"must be whole pages: {pool.buffer_tokens} tokens are none of {page} each"
        fix = f"give {-(-pool.buffer_tokens // page) * page}"
        out.append(Finding("pool.buffer_tokens", rule, fix))
    if pool.family == "swa" and page == 1:
        rule = (
            "is refused with pool.family = swa: single tokens have no page boundary for the "
            "window's tail to begin at, so the sliding layers would be charged in full, like the "
            "others"
        )
        fix = "give 2 or more, or pool.family = mha, which allocates all layers in full"
        out.append(Finding("pool.page_size", rule, fix))
    return out


def _layers(config: Config) -> list[Finding]:
    """Tokens have KV somewhere, unless a state is all there is."""
    if config.pool.layers or config.pool.family == "recurrent":
        return []
    what = "its sliding layers alone" if config.pool.family == "swa" else "nothing"
    rule = f"leaves {what}: only recurrent can do without a layer that has KV of every token"
    return [Finding("pool.layers", rule, "give at least 1")]


def _mixed(config: Config) -> list[Finding]:
    """What hisparse does not do."""
    if config.pool.family != "hisparse" or not config.engine.mixed_chunk:
        return []
    rule = (
        "is refused with pool.family = hisparse: a prompt's KV goes to host memory, a decoding "
        "request's to its device buffer, so one batch cannot write both"
    )
    return [Finding("engine.mixed_chunk", rule, "set it to false, or choose another family")]


def _chunks(config: Config) -> list[Finding]:
    if config.engine.chunk_tokens != 0:
        return []
    rule = "must be -1, or a whole number from 1 to 268435456"
    return [Finding("engine.chunk_tokens", rule, "the default is -1, the whole prompt")]


def _off(config: Config) -> list[Finding]:
    """Where nothing is cached nothing gives way."""
    if config.cache.mode != "off" or not is_given(config, "radix.policy"):
        return []
    rule = 'says nothing with cache.mode = "off": nothing is cached, so nothing gives way'
    return [Finding("radix.policy", rule, 'remove it, or set cache.mode = "radix"')]


# ---- memory --------------------------------------------------------------------------------------


def _parts(config: Config) -> tuple[Component, ...]:
    """The components; none while the keys that make them are not complete or contradict."""
    pool = config.pool
    is_sound = not missing(pool) and not _page_sizes(config) and not _layers(config)
    return components(pool) if is_sound else ()


def _aligned(config: Config) -> list[Finding]:
    """Every element of a state lies where programs can read it."""
    parts = _parts(config)
    state = next((one for one in parts if isinstance(one.extent, PerRequest)), None)
    found = misplaced(state) if state is not None else None
    if found is None:
        return []
    rule = (
        f"would lie at byte {found.offset_bytes} of the state, one of which follows the other at "
        f"{found.page_stride_bytes}: no multiples of the bytes of {found.dtype}"
    )
    fix = "pad the tensor with the narrowest type to a multiple of the widest one"
    return [Finding("pool.state", rule, fix, found.part)]


def _pool_fits(config: Config) -> list[Finding]:
    """Where kv is all there is, it needs its null page and one more."""
    parts, pool = _parts(config), config.pool
    if not parts or beside(parts) is not None or pool.pages is not None:
        return []
    n_shards = shard_count(pool)
    block = block_bytes(parts, n_shards)
    if page_counts(pool, parts)[0] >= 2:
        return []
    rule = f"must hold at least 2 pages, and one page of this pool takes {block} bytes"
    if n_shards > 1:
        rule += f" in its {n_shards} shards"
    return [Finding("pool.size", rule, f"give at least {-(-2 * block // 1024)}KiB")]


def _both_fit(config: Config) -> list[Finding]:
    """Where there are two budgets, each has room for one request."""
    parts, pool = _parts(config), config.pool
    other = beside(parts)
    if other is None:
        return []
    key = f"pool.{SECOND[pool.family]}"
    least = least_pages(other)
    given = second_budget(pool)
    first, second = page_counts(pool, parts)[0], page_counts(pool, parts)[parts.index(other)]
    if second < least and second == given:
        rule = f"must hold one request: {least} pages of {other.name}, the null page included"
        return [Finding(key, rule, f"give at least {least}")]
    if first >= 2 and second >= least:
        return []
    if pool.pages is not None:
        rule = f"leaves {second} pages of {other.name}, and one request takes {least}"
        return [Finding("pool.pages", rule, f"give more, or set {key}")]
    block, least = block_bytes(parts), given or least
    needed = 2 * block
    if not isinstance(other.extent, Buffer):
        needed += least * page_bytes(other)
    rule = (
        f"must hold at least 2 pages of kv ({block} bytes each) and {least} of {other.name} "
        f"({page_bytes(other)} bytes each)"
    )
    return [Finding("pool.size", rule, f"give at least {-(-needed // 1024)}KiB, or set {key}")]


def _page_ids_fit(config: Config) -> list[Finding]:
    """Page ids travel as int32."""
    parts = _parts(config)
    if not parts:
        return []
    count = max(page_counts(config.pool, parts))
    if count <= MAX_PAGES:
        return []
    key = "pool.size" if config.pool.pages is None else "pool.pages"
    rule = f"makes {count} pages, and page ids end at {MAX_PAGES}"
    return [Finding(key, rule, "give less memory or a larger pool.page_size")]


_FAMILY = frozenset({"pool.family", "pool.layers", *(f"pool.{name}" for name in BELONGS)})
_POOL = _FAMILY | {
    f"pool.{name}" for name in ("dtype", "page_size", "pages", "size", "typical_tokens", *KEYS)
}

FAMILY_RULES = (
    Rule(_needed, _FAMILY | {"cache.mode"}),
    Rule(_out_of_place, frozenset({"pool.family", "pool.layers"})),
    Rule(_page_sizes, frozenset({"pool.family", "pool.page_size", "pool.buffer_tokens"})),
    Rule(_layers, frozenset({"pool.family", "pool.layers"})),
    Rule(_mixed, frozenset({"pool.family", "engine.mixed_chunk"})),
    Rule(_chunks, frozenset({"engine.chunk_tokens"})),
    Rule(_off, frozenset({"cache.mode", "radix.policy"})),
    Rule(_aligned, _POOL),
    Rule(_pool_fits, _POOL),
    Rule(_both_fit, _POOL),
    Rule(_page_ids_fit, _POOL),
)
"""Rules over [pool] and what is done on it."""
