"""kvd's configuration: where values come from, what they must be, and what they are.

``load`` is the only way in; ``Config`` is what the daemon and the command line read.

Read first, in order: ``schema`` (every section and key, with its documentation), ``keys`` (the same
as one table, ``KEYS``, from which anything about keys is generated), ``load`` (sources, weakest
first), ``rules``, ``pool_rules`` and ``tier_rules`` (what bounds cannot say), ``render`` (as TOML,
explained key by key, what differs), ``plan`` (what a model takes). What belongs to one family of
pools is ``kvd.families``.

What must not be here: what anybody does with a value.
"""

from __future__ import annotations

from kvd.config.load import load
from kvd.config.origin import ConfigError, ValueOrigin, ValueSource
from kvd.config.pool import pool_spec
from kvd.config.schema import Config

__all__ = ["Config", "ConfigError", "ValueOrigin", "ValueSource", "load", "pool_spec"]
