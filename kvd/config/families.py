"""Which keys of [pool] belong to which family: those that it needs, and those that it may have.

Plain tables and plain functions over them. What a family's combination with other sections makes
impossible is ``family_rules``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.config.origin import Source

if TYPE_CHECKING:
    from kvd.config.pool_sections import PoolSection
    from kvd.config.schema import Config

_HEADS = "K and V per head are what mha, swa, hisparse and recurrent keep; mla keeps latents"
_LATENT = "mla keeps latents, and hisparse and recurrent may; the others keep K and V per head"
_WINDOW = "only swa has sliding layers"
_INDEX = "mha, mla and hisparse may have an index; the other families have no sparse attention"
_SCALE = (
    "scales are kept in lockstep with the pages of kv, which mha, mla and recurrent can do: those "
    "of a window or of a device buffer would need page ids of their own"
)
_BUFFER = "only hisparse has KV in host memory and a buffer of it on the device"
_STATE = "only recurrent has states"

BELONGS: dict[str, tuple[frozenset[str], str]] = {
    **dict.fromkeys(
        ("heads", "head_dim", "v_dim"),
        (frozenset({"mha", "swa", "hisparse", "recurrent"}), _HEADS),
    ),
    **dict.fromkeys(
        ("latent_dim", "rope_dim"), (frozenset({"mla", "hisparse", "recurrent"}), _LATENT)
    ),
    "scale_dtype": (frozenset({"mha", "mla", "recurrent"}), _SCALE),
    **dict.fromkeys(
        (
            *("window_tokens", "window_layers", "window_pages"),
            *("window_heads", "window_head_dim", "window_v_dim"),
        ),
        (frozenset({"swa"}), _WINDOW),
    ),
    **dict.fromkeys(
        ("index_dim", "index_heads", "index_dtype", "index_page_size"),
        (frozenset({"mha", "mla", "hisparse"}), _INDEX),
    ),
    **dict.fromkeys(("buffer_tokens", "buffer_pages"), (frozenset({"hisparse"}), _BUFFER)),
    **dict.fromkeys(("state_layers", "state", "states"), (frozenset({"recurrent"}), _STATE)),
}
"""Keys of [pool] that not every family has: which have it, and why the others do not."""

NEEDS: dict[str, tuple[str, ...]] = {
    "mha": (),
    "mla": ("latent_dim",),
    "swa": ("window_tokens", "window_layers"),
    "hisparse": ("buffer_tokens",),
    "recurrent": ("state_layers", "state"),
}
"""Keys of [pool] without which a family is none."""


def keeps_latents(pool: PoolSection) -> bool:
    """Whether its pages hold one latent per token rather than K and V per head."""
    return pool.family == "mla" or pool.latent_dim is not None


def counts_tokens(pool: PoolSection) -> bool:
    """Whether no layer has KV, so that a page is one token that takes no byte."""
    return pool.family == "recurrent" and pool.layers == 0


def is_kept(pool: PoolSection) -> bool:
    """Whether its memory outlives the daemon."""
    return pool.backing != "anon"


def is_in_files(pool: PoolSection) -> bool:
    """Whether its memory lies in files that have names."""
    return pool.backing in {"shm", "hugetlbfs"}


def missing(pool: PoolSection) -> list[tuple[str, str]]:
    """Keys of [pool] that are not there, each with the key that calls for it."""
    out = [(name, "family") for name in NEEDS[pool.family] if getattr(pool, name) in (None, {})]
    if pool.rope_dim is not None and pool.latent_dim is None and pool.family != "mla":
        out.append(("latent_dim", "rope_dim"))
    if pool.index_dim is None:
        about = ("index_heads", "index_dtype", "index_page_size")
        out += [("index_dim", name) for name in about if getattr(pool, name) is not None][:1]
    return out


def reason_out_of_place(config: Config, name: str) -> str | None:
    """Why ``pool.<name>`` means nothing in this pool; None where it does mean something."""
    pool = config.pool
    families, why = BELONGS.get(name, (frozenset({pool.family}), ""))
    if pool.family not in families:
        return why
    is_layout = name in {"heads", "head_dim", "v_dim", "latent_dim", "rope_dim", "dtype"}
    if counts_tokens(pool) and (is_layout or name in {"page_size", "scale_dtype"}):
        return "with pool.layers = 0 no layer has KV: a page is one token and takes no byte"
    if name in {"heads", "head_dim", "v_dim"} and keeps_latents(pool):
        return "pool.latent_dim says that latents are kept, which have no heads"
    return None


def is_given(config: Config, key: str) -> bool:
    """Whether somebody wrote the key (or an entry of it), rather than leave its default."""
    return any(
        origin.source is not Source.DEFAULT
        for path, origin in config.origins.items()
        if path == key or path.startswith(f"{key}.")
    )


def is_of_use(config: Config, key: str) -> bool:
    """Whether a key says anything in this configuration; what says nothing is not shown."""
    if key == "radix.policy":
        return config.cache.mode == "radix"
    if key == "transfer.integrity":
        return config.cache.mode != "prefill-only"
    if key == "pool.directory":
        return is_in_files(config.pool)
    if key == "pool.verify":
        return is_kept(config.pool)
    section, _, name = key.partition(".")
    return section != "pool" or reason_out_of_place(config, name) is None
