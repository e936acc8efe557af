"""Every key of a configuration with what it is, where it came from and what it means."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec

from kvd.config.keys import KEYS, Key, Kind, Value
from kvd.config.render import toml_value, value_of

if TYPE_CHECKING:
    from kvd.config.schema import Config


class Explanation(msgspec.Struct, frozen=True):
    """One key, or one entry of a table. ``shown`` is the value as TOML, ``origin`` its place."""

    key: str
    value: Value
    shown: str
    origin: str
    doc: str
    rule: str


def explanations(config: Config) -> list[Explanation]:
    """All keys in the order of the schema, the entries of a table below it."""
    out: list[Explanation] = []
    for key in KEYS.values():
        value = value_of(config, key)
        out.append(_row(config, key, key.path, value))
        if key.kind is Kind.TABLE:
            table = cast("dict[str, str]", value)
            out += [_row(config, key, f"{key.path}.{name}", table[name]) for name in table]
    return out


def _row(config: Config, key: Key, path: str, value: Value) -> Explanation:
    return Explanation(
        key=path,
        value=value,
        shown="(left out)" if value is None else toml_value(value),
        origin=config.origins[path].place,
        doc=key.doc,
        rule=key.rule,
    )
