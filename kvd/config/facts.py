"""The keys of a model's configuration, each read as what it must be."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class NotPlanned(Exception):
    """A configuration does not say enough; the message names the key."""


class Facts:
    """A table of keys. Numbers are whole, and not negative."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self.values = values

    def get(self, key: str) -> object:
        """Whatever stands there; None for nothing."""
        return self.values.get(key)

    def number(self, *keys: str) -> int:
        """The first of ``keys`` that is there: at least 1.

        Raises:
            NotPlanned: none is there, or it is none.
        """
        found = self.maybe(*keys)
        if not found:
            raise NotPlanned(f"{' or '.join(keys)} is missing")
        return found

    def maybe(self, *keys: str) -> int:
        """The first of ``keys`` that is there and not null; 0 for none.

        Raises:
            NotPlanned: it is no whole number, or negative.
        """
        for key in keys:
            found = self.values.get(key)
            if found is None:
                continue
            if not isinstance(found, int) or isinstance(found, bool) or found < 0:
                raise NotPlanned(f"{key} = {found!r} is no whole number")
            return found
        return 0

    def text(self, key: str) -> str:
        """The text at ``key``.

        Raises:
            NotPlanned: there is none.
        """
        found = self.values.get(key)
        if not isinstance(found, str):
            raise NotPlanned(f"{key} is missing")
        return found

    def kinds(self, key: str) -> list[str]:
        """The list of texts at ``key``; empty for none."""
        found = self.values.get(key)
        return [str(one) for one in found] if isinstance(found, list) else []
