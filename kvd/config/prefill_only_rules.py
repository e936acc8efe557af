"""What cache.mode = "prefill-only" rules out: whatever would read, write, send or keep KV.

There is no KV in this mode, so an engine that needs any would find out in the middle of its first
request. Each combination is refused by itself, with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.config.families import is_given
from kvd.config.finding import Finding, Rule
from kvd.config.pool import PREFILL_ONLY

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.config.schema import Config

_MODE = 'with cache.mode = "prefill-only"'
_LEAVE = 'or set cache.mode = "radix"'

_FAMILIES = {
    "mla": "attention over latents expands them from the pool, so they must be written",
    "swa": "sliding layers have a window of the pool, and a budget of its own, and there is none",
    "hisparse": "its KV lies in host memory, from where it is fetched, and there is none",
    "recurrent": "a state is carried from token to token, so it must be kept",
}


def _family(config: Config) -> list[Finding]:
    why = _FAMILIES.get(config.pool.family)
    if why is None:
        return []
    return [Finding("pool.family", f"is refused {_MODE}: {why}", f"write mha, {_LEAVE}")]


def _workload(config: Config) -> list[Finding]:
    if config.engine.workload != "generate":
        return []
    rule = f"is refused {_MODE}: each decoded token reads the KV of those before it"
    return [Finding("engine.workload", rule, f"set embedding or scoring, {_LEAVE}")]


def _chunks(config: Config) -> list[Finding]:
    if config.engine.chunk_tokens in {-1, 0}:
        return []
    rule = f"is refused {_MODE}: the second chunk of a prompt reads the KV of the first"
    return [Finding("engine.chunk_tokens", rule, f"set -1, the whole prompt, {_LEAVE}")]


def _mixed(config: Config) -> list[Finding]:
    if not config.engine.mixed_chunk:
        return []
    rule = f"is refused {_MODE}: a batch that decodes reads KV"
    return [Finding("engine.mixed_chunk", rule, f"set false, {_LEAVE}")]


def _context_parallel(config: Config) -> list[Finding]:
    if config.engine.context_parallel == 1:
        return []
    rule = f"is refused {_MODE}: ranks that share a prompt write its KV to read each other's part"
    return [Finding("engine.context_parallel", rule, f"set 1, {_LEAVE}")]


def _attention(config: Config) -> list[Finding]:
    if config.engine.attention == "varlen":
        return []
    rule = f"is refused {_MODE}: paged attention reads K and V from the pool"
    return [Finding("engine.attention", rule, f"set varlen if the engine can, {_LEAVE}")]


def _scales(config: Config) -> list[Finding]:
    if config.pool.scale_dtype is None:
        return []
    rule = f"is refused {_MODE}: quantising KV stores its scales, and nothing may be written"
    return [Finding("pool.scale_dtype", rule, f"remove it, {_LEAVE}")]


def _index(config: Config) -> list[Finding]:
    if config.pool.index_dim is None:
        return []
    rule = f"is refused {_MODE}: an index is read to choose KV, and there is none"
    return [Finding("pool.index_dim", rule, f"remove it, {_LEAVE}")]


def _policy(config: Config) -> list[Finding]:
    if not is_given(config, "radix.policy"):
        return []
    rule = f"is refused {_MODE}: a prefix that is matched must be readable, so nothing is cached"
    return [Finding("radix.policy", rule, f"remove it, {_LEAVE}")]


def _saved(config: Config) -> list[Finding]:
    if config.pool.saved_size is None:
        return []
    rule = f"is refused {_MODE}: there is nothing to save of a lease"
    return [Finding("pool.saved_size", rule, f"remove it, {_LEAVE}")]


def _integrity(config: Config) -> list[Finding]:
    if not is_given(config, "transfer.integrity"):
        return []
    rule = f"is refused {_MODE}: there is no page whose bytes could be compared"
    return [Finding("transfer.integrity", rule, f"remove it, {_LEAVE}")]


def _peers(config: Config) -> list[Finding]:
    rule = f"is refused {_MODE}: nothing can be sent to a peer, nor received"
    return [
        Finding("peers.connect", rule, f"remove it, {_LEAVE}", name)
        for name in config.peers.connect
    ]


def _in_this_mode(check: Callable[[Config], list[Finding]], *needs: str) -> Rule:
    def judged(config: Config) -> list[Finding]:
        return check(config) if config.cache.mode == PREFILL_ONLY else []

    return Rule(judged, frozenset({"cache.mode", *needs}))


PREFILL_ONLY_RULES = (
    _in_this_mode(_family, "pool.family"),
    _in_this_mode(_workload, "engine.workload"),
    _in_this_mode(_chunks, "engine.chunk_tokens"),
    _in_this_mode(_mixed, "engine.mixed_chunk"),
    _in_this_mode(_context_parallel, "engine.context_parallel"),
    _in_this_mode(_attention, "engine.attention"),
    _in_this_mode(_scales, "pool.scale_dtype"),
    _in_this_mode(_index, "pool.index_dim"),
    _in_this_mode(_policy, "radix.policy"),
    _in_this_mode(_saved, "pool.saved_size"),
    _in_this_mode(_integrity, "transfer.integrity"),
    _in_this_mode(_peers),
)
"""One rule for each thing that this mode rules out."""
