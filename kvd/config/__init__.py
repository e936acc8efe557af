"""kvd's configuration: where values come from, what they must be, and what they are.

``load`` is the only way in; ``Config`` is what the daemon and the command line read.
"""

from __future__ import annotations

from kvd.config.load import load
from kvd.config.origin import ConfigError, Origin, Source
from kvd.config.pool import pool_spec
from kvd.config.schema import Config

__all__ = ["Config", "ConfigError", "Origin", "Source", "load", "pool_spec"]
