"""What more or less than the whole model in one shard rules out, and why.

Shards are built for pages of one kind, cut across layers and heads; anything else is refused here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.config.families import is_given, is_kept
from kvd.config.finding import Finding, Rule
from kvd.config.pool import PREFILL_ONLY
from kvd.config.sharding import KEYS, held, layers_here, model_heads, ranks_here
from kvd.core.layout.shards import MAX_SHARDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.config.schema import Config

_FAMILIES = {
    "swa": "the window of a sequence has pages of its own, which are not cut",
    "hisparse": "its host memory and its device buffer are those of one device",
    "recurrent": "a state has no layers and heads of KV by which it could be cut",
}
_WHOLE = "or hold the whole model in one shard"


def _heads(config: Config) -> list[Finding]:
    """Every rank has equally many heads, or every head equally many ranks."""
    heads, size = model_heads(config.pool), config.pool.tp_size
    if not (heads % size and size % heads):
        return []
    fitting = [n for n in range(1, 2 * max(heads, size)) if not (heads % n and n % heads)]
    near = min(fitting, key=lambda n: (abs(n - size), n))
    rule = f"divides no {heads} heads (pool.heads) evenly: one number must divide the other"
    return [Finding("pool.tp_size", rule, f"the nearest that does is {near}")]


def _ranks(config: Config) -> list[Finding]:
    """The ranks of this node are some of all."""
    size, (_, end) = config.pool.tp_size, ranks_here(config.pool)
    if end <= size:
        return []
    rule = f"must be ranks from 0 to {size - 1}: there are {size} (pool.tp_size)"
    return [Finding("pool.tp_ranks", rule, "name those of this node, or raise pool.tp_size")]


def _stage(config: Config) -> list[Finding]:
    """The layers of this node are some of the model's."""
    layers, (_, end) = config.pool.layers, layers_here(config.pool)
    if end <= layers:
        return []
    rule = f"must end at {layers} or before: the model has so many layers (pool.layers)"
    return [Finding("pool.stage", rule, "pool.layers is of the whole model, not of this stage")]


def _many(config: Config) -> list[Finding]:
    first, end = ranks_here(config.pool)
    n_shards = (end - first) * config.pool.replicas
    if n_shards <= MAX_SHARDS:
        return []
    rule = f"makes {n_shards} shards on this node, at most {MAX_SHARDS} are held"
    key = "pool.replicas" if config.pool.replicas > 1 else "pool.tp_ranks"
    return [Finding(key, rule, "name the ranks of this node in pool.tp_ranks")]


def _family(config: Config) -> list[Finding]:
    why = _FAMILIES.get(config.pool.family)
    if why is None:
        return []
    family = config.pool.family
    rule = f"is refused with pool.family = {family}: {why}; only mha and mla are cut into shards"
    return [Finding(_key(config), rule, f"remove it, {_WHOLE}")]


def _companions(config: Config) -> list[Finding]:
    out = []
    for name in ("index_dim", "scale_dtype"):
        if getattr(config.pool, name) is not None:
            rule = (
                f"is refused with {_key(config)}: it makes a component beside kv, and only pools "
                "of one component are cut into shards"
            )
            out.append(Finding(f"pool.{name}", rule, f"remove it, {_WHOLE}"))
    return out


def _mode(config: Config) -> list[Finding]:
    if config.cache.mode != PREFILL_ONLY:
        return []
    rule = f'is refused with cache.mode = "{PREFILL_ONLY}": there is no KV that could be cut'
    return [Finding(_key(config), rule, "remove it: tokens are counted once for all ranks")]


def _backing(config: Config) -> list[Finding]:
    if not is_kept(config.pool):
        return []
    rule = (
        f"is refused with {_key(config)}: checksums of kept pages are of one shard, so the next "
        "daemon could not prove the others"
    )
    return [Finding("pool.backing", rule, f'set "anon", {_WHOLE}')]


def _key(config: Config) -> str:
    """The key that makes this pool a sharded one: the first that somebody wrote."""
    names = [f"pool.{name}" for name in KEYS]
    return next((name for name in names if is_given(config, name)), names[0])


_SHARDS = frozenset({"pool.heads", "pool.layers", *(f"pool.{name}" for name in KEYS)})


def _where_sharded(check: Callable[[Config], list[Finding]], *needs: str) -> Rule:
    def judged(config: Config) -> list[Finding]:
        return check(config) if held(config.pool) is not None else []

    return Rule(judged, _SHARDS | {"pool.family", "pool.latent_dim", *needs})


SHARD_RULES = (
    Rule(_heads, frozenset({"pool.tp_size", "pool.heads", "pool.family", "pool.latent_dim"})),
    Rule(_ranks, frozenset({"pool.tp_ranks", "pool.tp_size"})),
    Rule(_stage, frozenset({"pool.stage", "pool.layers"})),
    Rule(_many, frozenset({"pool.tp_ranks", "pool.tp_size", "pool.replicas"})),
    _where_sharded(_family),
    _where_sharded(_companions, "pool.index_dim", "pool.scale_dtype"),
    _where_sharded(_mode, "cache.mode"),
    _where_sharded(_backing, "pool.backing"),
)
"""One rule for each thing that shards rule out."""
