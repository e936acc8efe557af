"""[pool] as a whole: which keys mean something in its family, and the spec that they come to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.config.origin import ValueSource
from kvd.core.layout.spec import Interior, PageOrder, PoolSpec, Raw, State
from kvd.families import FAMILIES, POOLS, PoolSection
from kvd.families.budget import page_counts, saved_counts
from kvd.families.family import ELEMENTS, GROUPS, HEADS, KeyGroup, among
from kvd.families.prefill_only import PREFILL_ONLY
from kvd.families.sharding import held

if TYPE_CHECKING:
    from kvd.config.schema import Config
    from kvd.core.layout.spec import Component
    from kvd.families import PoolFamily


def family_of(pool: PoolSection) -> PoolFamily[PoolSection]:
    """The row of the family that ``pool.family`` names."""
    return POOLS[pool.family]


def components(pool: PoolSection) -> tuple[Component, ...]:
    """What its family keeps, the first of them ``kv``; the keys that it needs must be there."""
    return _laid_out(pool, family_of(pool).components(pool))


def _laid_out(pool: PoolSection, parts: tuple[Component, ...]) -> tuple[Component, ...]:
    """The interior is the pool's: its families make components without it."""
    interior = Interior(pool.interior)
    return tuple(
        component
        if isinstance(component.layout, Raw | State)
        else msgspec.structs.replace(component, interior=interior)
        for component in parts
    )


def counts_of(pool: PoolSection, parts: tuple[Component, ...]) -> tuple[int, ...]:
    """Pages of each of ``parts``; less than 2 where memory is too short."""
    return page_counts(parts, family_of(pool).divide(pool, parts))


def pool_spec(config: Config) -> PoolSpec:
    """The spec of the configured pool."""
    pool = config.pool
    is_counted = config.cache.mode == PREFILL_ONLY
    family = FAMILIES[PREFILL_ONLY] if is_counted else family_of(pool)
    parts = _laid_out(pool, family.components(pool))
    counts = page_counts(parts, family.divide(pool, parts))
    return PoolSpec(
        name=pool.name,
        family=family.name,
        order=PageOrder(pool.order),
        components=parts,
        pages=counts,
        saved_pages=() if is_counted else saved_counts(pool, parts, counts),
        held=None if is_counted else held(pool),
        tag=pool.tag,
    )


# ---- which keys belong to which family -----------------------------------------------------------


def _why(group: KeyGroup, having: list[str]) -> str:
    needing = [name for name in having if POOLS[name].needs.keys() & set(group.keys)]
    return group.why.format(
        having=among(having),
        needing=_keeping(needing),
        may=among([name for name in having if name not in needing]),
        others=_keeping([name for name in POOLS if name not in having]),
    )


def _keeping(names: list[str]) -> str:
    return f"{among(names)} {'keeps' if len(names) == 1 else 'keep'}"


def _belonging() -> dict[str, tuple[frozenset[str], str]]:
    table: dict[str, tuple[frozenset[str], str]] = {}
    for group in GROUPS:
        having = [row.name for row in POOLS.values() if group in row.groups]
        table |= dict.fromkeys(group.keys, (frozenset(having), _why(group, having)))
    for row in POOLS.values():
        for name in row.section.__struct_fields__[len(PoolSection.__struct_fields__) :]:
            having = [
                family.name for family in POOLS.values() if name in family.section.__struct_fields__
            ]
            verb = "has" if len(having) == 1 else "have"
            why = f"only {among(having)} {verb} {POOLS[having[0]].alone}"
            table[name] = (frozenset(having), why)
    return table


BELONGS = _belonging()
"""Keys of [pool] that not every family has: which have it, and why the others do not."""


def missing(pool: PoolSection) -> list[tuple[str, str]]:
    """Keys of [pool] that are not there, each with the key that calls for it."""
    values = msgspec.structs.asdict(pool)
    needs = family_of(pool).needs
    out = [(name, "family") for name in needs if values[name] in (None, {})]
    if pool.rope_dim is not None and pool.latent_dim is None and "latent_dim" not in needs:
        out.append(("latent_dim", "rope_dim"))
    if pool.index_dim is None:
        about = ("index_heads", "index_dtype", "index_page_size")
        out += [("index_dim", name) for name in about if values[name] is not None][:1]
    return out


def reason_out_of_place(config: Config, name: str) -> str | None:
    """Why ``pool.<name>`` means nothing in this pool; None where it does mean something."""
    pool = config.pool
    families, why = BELONGS.get(name, (frozenset({pool.family}), ""))
    if pool.family not in families:
        return why
    is_layout = name in {*HEADS.keys, "latent_dim", "rope_dim", *ELEMENTS.keys}
    if pool.counts_tokens and (is_layout or name in {"page_size", "scale_dtype"}):
        return "with pool.layers = 0 no layer has KV: a page is one token and takes no byte"
    if name in HEADS.keys and pool.keeps_latents:
        return "pool.latent_dim says that latents are kept, which have no heads"
    return None


def is_given(config: Config, key: str) -> bool:
    """Whether somebody wrote the key (or an entry of it), rather than leave its default."""
    return any(
        origin.source is not ValueSource.DEFAULT
        for path, origin in config.origins.items()
        if path == key or path.startswith(f"{key}.")
    )


def is_of_use(config: Config, key: str) -> bool:
    """Whether a key says anything in this configuration; what says nothing is not shown."""
    match key:
        case "radix.policy":
            return config.cache.mode == "radix"
        case "transfer.integrity":
            return config.cache.mode != PREFILL_ONLY
        case "pool.directory":
            return config.pool.is_in_files
        case "pool.verify":
            return config.pool.is_kept
        case _ if key.startswith("tiers."):
            disk, store = config.tiers_disk.directory, config.tiers_store.endpoint
            return (disk if key.startswith("tiers.disk.") else store) is not None
        case _:
            section, _, name = key.rpartition(".")
            return section != "pool" or reason_out_of_place(config, name) is None
