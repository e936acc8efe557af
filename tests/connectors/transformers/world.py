"""Small models of random weights, and daemons whose pools are for them."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from kvd.connectors.transformers import node
from kvd.connectors.transformers.layout import shape_of
from kvd.demo.models import ARCHITECTURES
from tests.demo.reference import model_of, tokens
from tests.support.daemons import one_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from transformers import PreTrainedModel

    from kvd.connectors.transformers import GenerateNode
    from tests.support.daemons import Daemon

ANSWER = 20
"""Tokens: an answer goes over a page's end."""

PAGES, BESIDE = 200, 50

COUNTED_PAGES = 2000
"""Of a pool whose tokens take no bytes."""


def settings_for(model: PreTrainedModel, **more: str) -> dict[str, str]:
    """The configuration of a daemon, from the section that the connector says fits."""
    found = {}
    shape = shape_of(model)
    for line in shape.section("16MiB").splitlines():
        key, _, value = line.partition(" = ")
        found[f"pool.{key}"] = value.strip('"')
    beside = {"swa": "window_pages", "recurrent": "states"}.get(found["pool.family"])
    if beside is not None:
        del found["pool.size"]
        pages = PAGES if shape.has_kv else COUNTED_PAGES
        found |= {"pool.pages": str(pages), f"pool.{beside}": str(BESIDE)}
    return found | {f"pool.{key}": value for key, value in more.items()}


@contextlib.contextmanager
def daemon_for(model: PreTrainedModel, **more: str) -> Iterator[Daemon]:
    """A daemon with such a pool."""
    settings = settings_for(model, **more)
    with (
        tempfile.TemporaryDirectory(prefix="kvd-hf-") as directory,
        one_daemon(Path(directory), settings) as daemon,
    ):
        yield daemon


def prompt(count: int, seed: int = 7) -> torch.Tensor:
    """(1, count) random tokens."""
    return tokens(count, seed)


def answered(model: PreTrainedModel, ids: torch.Tensor, **how: object) -> torch.Tensor:
    """What a script does."""
    return model.generate(ids, **{"max_new_tokens": ANSWER, "do_sample": False, **how})


def held(daemon: Daemon) -> int:
    """Pages that somebody has, or that are locked."""
    pools = daemon.snapshot().pools
    return sum(pool.held_pages + pool.locked_pages + pool.quarantined_pages for pool in pools)


def nothing_is_held(daemon: Daemon) -> None:
    """A lease is left without waiting for it."""
    daemon.wait_for(lambda: held(daemon) == 0, "something is held", 60)


def served(model: PreTrainedModel, daemon: Daemon, **how: object) -> GenerateNode:
    """As a script opens it."""
    return node(model, daemon.client, **how)


__all__ = [
    "ANSWER",
    "ARCHITECTURES",
    "answered",
    "daemon_for",
    "held",
    "model_of",
    "nothing_is_held",
    "prompt",
    "served",
    "settings_for",
]
