"""What differs between two configurations: key by key, and tables entry by entry."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec

from kvd.config.keys import KEYS, Kind, Value
from kvd.config.render import value_of
from kvd.config.sources import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.config.keys import Key
    from kvd.config.schema import Config


class Change(msgspec.Struct, frozen=True):
    """One key, or one ``entry`` of a table, and its values; None where it has none."""

    key: str
    before: Value
    after: Value
    entry: str | None = None

    @property
    def subject(self) -> str:
        """As the configuration writes it."""
        return self.key if self.entry is None else f"{self.key}.{self.entry}"

    @property
    def is_addition(self) -> bool:
        """Whether a table has one entry more."""
        return self.entry is not None and self.before is None

    @property
    def texts(self) -> tuple[str, str, str]:
        """Subject, before and after; empty where there is no value."""
        before, after = (
            "" if value is None else shown(value) for value in (self.before, self.after)
        )
        return self.subject, before, after


def changes(before: Config, after: Config) -> list[Change]:
    """Everything that differs, in the order of the schema."""
    return [one for key in KEYS.values() for one in _of_key(key, before, after)]


def with_changes(config: Config, taken: list[Change]) -> Config:
    """``config`` with the values after these changes."""
    for change in taken:
        section, _, name = change.key.partition(".")
        value = change.after
        if change.entry is not None:
            table = cast("dict[str, str]", value_of(config, KEYS[change.key]))
            value = {**table, change.entry: cast("str", change.after)}
        replaced = msgspec.structs.replace(getattr(config, section), **{name: value})
        config = msgspec.structs.replace(config, **{section: replaced})
    return config


def _of_key(key: Key, before: Config, after: Config) -> Iterator[Change]:
    was, is_now = value_of(before, key), value_of(after, key)
    if was == is_now:
        return
    if key.kind is not Kind.TABLE:
        yield Change(key.path, was, is_now)
        return
    old, new = cast("dict[str, str]", was), cast("dict[str, str]", is_now)
    for entry in {**old, **new}:
        if old.get(entry) != new.get(entry):
            yield Change(key.path, old.get(entry), new.get(entry), entry)
