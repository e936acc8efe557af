"""What a pool that outlives its daemon cannot be, and why: pool.backing other than anon.

The next daemon believes a page if the journal says which tokens it holds and its checksum is right.
That is built for pages of one kind, each of which stands for itself; anything else is refused here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.config.families import is_in_files, is_kept
from kvd.config.finding import Finding, Rule

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.config.schema import Config

_ONLY = "only pools with one whole component can be adopted"
_ANON = 'or set pool.backing = "anon"'

_FAMILIES = {
    "swa": "the window of a sequence has pages of its own, and slides",
    "hisparse": "the buffer on the device is filled for one daemon's requests",
    "recurrent": "a state has no tokens of its own by which it could be found again",
}
_MODES = {
    "off": "nothing is cached, so there is nothing to adopt",
    "prefill-only": "there is no KV, so there is nothing to adopt",
}


def _family(config: Config) -> list[Finding]:
    why = _FAMILIES.get(config.pool.family)
    if why is None:
        return []
    rule = f"is refused with pool.backing = {config.pool.backing}: {why}; {_ONLY}"
    return [Finding("pool.family", rule, f"write mha or mla, {_ANON}")]


def _companions(config: Config) -> list[Finding]:
    out = []
    for key, value in (
        ("pool.index_dim", config.pool.index_dim),
        ("pool.scale_dtype", config.pool.scale_dtype),
    ):
        if value is not None:
            rule = (
                f"is refused with pool.backing = {config.pool.backing}: it makes a component "
                f"beside kv, of which no checksums are kept; {_ONLY}"
            )
            out.append(Finding(key, rule, f"remove it, {_ANON}"))
    return out


def _mode(config: Config) -> list[Finding]:
    why = _MODES.get(config.cache.mode)
    if why is None:
        return []
    rule = f"is refused with cache.mode = {config.cache.mode}: {why}"
    return [Finding("pool.backing", rule, 'set "anon", or set cache.mode = "radix"')]


def _device(config: Config) -> list[Finding]:
    pool = config.pool
    if pool.device == "cpu":
        return []
    rule = (
        f"is refused with pool.backing = {pool.backing}: memory of a device is of the process that "
        "allocated it, and ends with it"
    )
    return [Finding("pool.device", rule, f'write "cpu", {_ANON}')]


def _directory(config: Config) -> list[Finding]:
    pool = config.pool
    if pool.directory is None or is_in_files(pool):
        return []
    rule = f"says nothing with pool.backing = {pool.backing}, which has no files"
    return [Finding("pool.directory", rule, 'remove it, or set pool.backing = "shm"')]


def _where_kept(check: Callable[[Config], list[Finding]], *needs: str) -> Rule:
    def judged(config: Config) -> list[Finding]:
        return check(config) if is_kept(config.pool) else []

    return Rule(judged, frozenset({"pool.backing", *needs}))


KEPT_RULES = (
    _where_kept(_family, "pool.family"),
    _where_kept(_companions, "pool.index_dim", "pool.scale_dtype"),
    _where_kept(_mode, "cache.mode"),
    _where_kept(_device, "pool.device"),
    Rule(_directory, frozenset({"pool.backing", "pool.directory"})),
)
"""One rule for each thing that memory which outlives the daemon rules out."""
