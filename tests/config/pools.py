"""The least that each family needs, as --set texts."""

from __future__ import annotations

from kvd.config import Config, load
from kvd.config.host import HostFacts

HOST = HostFacts(node_name="node-0", runtime="/run/kvd", config_file="/nonexistent/kvd.toml")

POOLS: dict[str, list[str]] = {
    "mha": [],
    "mla": ["pool.family=mla", "pool.latent_dim=512", "pool.rope_dim=64"],
    "swa": ["pool.family=swa", "pool.window_tokens=100", "pool.window_layers=20"],
    "hisparse": ["pool.family=hisparse", "pool.latent_dim=512", "pool.buffer_tokens=4096"],
    "recurrent": [
        "pool.family=recurrent",
        "pool.state_layers=3",
        "pool.state.conv=bfloat16[8,3]",
        "pool.state.ssm=float32[4,2,8]",
    ],
    "raw": ["pool.family=raw", "pool.page_bytes=4096"],
}

PREFILL_ONLY = ["cache.mode=prefill-only", "engine.workload=embedding", "engine.attention=varlen"]


def config_of(*sets: str) -> Config:
    """A configuration that must be valid."""
    config = load(None, {}, sets, host=HOST)
    assert isinstance(config, Config), [error.sentence for error in config]
    return config


def findings(*sets: str) -> list[tuple[str, str, str]]:
    """Key, rule and fix of each error."""
    loaded = load(None, {}, sets, host=HOST)
    if isinstance(loaded, Config):
        return []
    return [(error.key, error.rule, error.fix) for error in loaded]
