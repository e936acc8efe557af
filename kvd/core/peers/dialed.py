"""A peer that the configuration names, and what became of calling it."""

from __future__ import annotations


class Dialed:
    """A configured link and the name that must answer on it."""

    __slots__ = ("address", "answered", "name", "trouble", "trouble_s")

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.answered = False
        self.trouble = ""
        """Why the last handshake on it failed, and when."""
        self.trouble_s = 0.0
