"""kvd, the KV transfer daemon."""

__version__ = "0.1.0"
