"""Families of pools: what a sequence owns, one file a family.

A family is a row of data (``PoolFamily``): its keys of ``[pool]``, the components that they make,
how its memory is divided, what it cannot be combined with, which models it suits, and the shape of
a small one. Adding a family is a file here with such a row, its name in ``NAMES``, its tests and
its page: ``kvd.config`` builds keys, rules, rendering and plans from the rows, and the core knows
components by what they are, never by family.

Read first: ``family.PoolFamily`` (the row), ``mha`` (the shortest), ``swa`` (a second budget),
``keys.PoolSection`` (keys that several families share), ``budget`` (pages from bytes).

What must not be here: files, the environment, other sections than as data; and no ``if`` on the
name of a family, here or anywhere.
"""

from __future__ import annotations

from importlib import import_module

from kvd.families.family import Breach, KeyGroup, PlanRequest, PoolFamily, RefusedKey, Value
from kvd.families.keys import PoolSection

__all__ = [
    "FAMILIES",
    "POOLS",
    "Breach",
    "KeyGroup",
    "PlanRequest",
    "PoolFamily",
    "PoolSection",
    "RefusedKey",
    "Value",
]

NAMES = ("mha", "mla", "swa", "hisparse", "recurrent", "raw", "prefill_only")
"""Modules of this package with a ``FAMILY``, in the order in which families are shown."""

# By name and not by import statement, so that a family is one word here.
_ROWS: list[PoolFamily[PoolSection]] = [
    import_module(f"{__name__}.{name}").FAMILY for name in NAMES
]

FAMILIES = {row.name: row for row in _ROWS}
"""Every family by its name."""

POOLS = {row.name: row for row in _ROWS if not row.is_mode}
"""Those that ``pool.family`` may name."""
