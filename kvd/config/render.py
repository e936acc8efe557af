"""A configuration for its readers: as TOML, key by key with its origin, what differs, and a rule.

In the example a line ``#key = value`` is a default and ``# text`` is prose, as in sshd_config.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, cast

import msgspec

from kvd.config.host import HostFacts
from kvd.config.keys import KEYS, ConfigKey, KeyKind, value_of
from kvd.config.load import host_defaults
from kvd.config.pool import is_of_use
from kvd.config.schema import SECTIONS, field_of
from kvd.config.sources import shown
from kvd.families import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kvd.config.schema import Config

EXAMPLE_HOST = HostFacts(node_name="node-0", runtime="/run/kvd")
"""The host whose defaults the example shows."""

NONE_CHOSEN: Final[Mapping[str, Value]] = MappingProxyType({})

_HEAD = """\
# Configuration of kvd, the KV transfer daemon: /etc/kvd/kvd.toml.
#
# Every line of the form #key = value shows a default; remove the # to change it. Files in conf.d
# beside this one, then variables like KVD_POOL__SIZE, then --set pool.size=... override it.
# Check a change with: kvd config check
"""


def toml_value(value: Value) -> str:
    """One value as TOML."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # TOML's basic strings are JSON's, except that DEL must be escaped too.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case tuple() | list():
            return f"[{', '.join(toml_value(item) for item in value)}]"
        case dict():
            return f"{{ {', '.join(_entries(value))} }}" if value else "{}"
        case _:
            return str(value)


def _entries(table: dict[str, str]) -> list[str]:
    """The lines of a table."""
    return [
        f"{name if re.fullmatch('[A-Za-z0-9_-]+', name) else toml_value(name)} = {toml_value(item)}"
        for name, item in table.items()
    ]


def effective(config: Config) -> str:
    """The configuration as a file that gives the same anywhere; keys of other families left out."""
    sections: dict[str, dict[str, Value]] = {section: {} for section in SECTIONS}
    for key in KEYS.values():
        value = value_of(config, key)
        is_shown = value if key.kind is KeyKind.TABLE else is_of_use(config, key.path)
        if value is not None and is_shown:
            sections[key.section][key.name] = value
    return as_file(sections)


def as_file(sections: Mapping[str, Mapping[str, Value]]) -> str:
    """Values by section and key as TOML, which wants the tables of a section after its keys."""
    blocks: list[str] = []
    for section, keys in sections.items():
        plain = [f"{k} = {toml_value(v)}" for k, v in keys.items() if not isinstance(v, dict)]
        blocks.append("\n".join([f"[{section}]", *plain]))
        blocks += [
            "\n".join([f"[{section}.{name}]", *_entries(table)])
            for name, table in keys.items()
            if isinstance(table, dict)
        ]
    return "\n\n".join(blocks) + "\n"


def example(chosen: Mapping[str, Value] = NONE_CHOSEN) -> str:
    """The example file: every key with its documentation, its rule and its default.

    Args:
        chosen: values by key that the file does set, instead of showing the default. No tables.
    """
    defaults = {key.path: key.default for key in KEYS.values()} | host_defaults(EXAMPLE_HOST)
    blocks = [_HEAD]
    for section, struct in SECTIONS.items():
        plain, tables = _keys_of(section)
        blocks.append(f"\n# {struct.__doc__}\n[{section}]\n")
        for key in plain:
            set_to = chosen.get(key.path)
            line = _shown(key, defaults[key.path])
            if set_to is not None:
                line = [f"{key.name} = {toml_value(set_to)}"]
            blocks.append(_block([*_prose(key), *line]))
        blocks += [_block([*_prose(key), f"[{key.path}]", *_shown(key, None)]) for key in tables]
    return "\n".join(blocks)


def as_tables(config: Config) -> dict[str, dict[str, Value]]:
    """The values by section and key; a key without a value is null."""
    tables: dict[str, dict[str, Value]] = {section: {} for section in SECTIONS}
    for key in KEYS.values():
        tables[key.section][key.name] = value_of(config, key)
    return tables


def _block(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


def _keys_of(section: str) -> tuple[list[ConfigKey], list[ConfigKey]]:
    """The plain keys of a section and its tables, which TOML wants last."""
    keys = [key for key in KEYS.values() if key.section == section]
    tables = [key for key in keys if key.kind is KeyKind.TABLE]
    return [key for key in keys if key.kind is not KeyKind.TABLE], tables


def _prose(key: ConfigKey) -> list[str]:
    """Documentation and rule as comments."""
    return textwrap.wrap(
        f"{key.doc} Rule: {key.rule}.",
        width=98,
        initial_indent="# ",
        subsequent_indent="# ",
        break_on_hyphens=False,
    )


def _shown(key: ConfigKey, default: Value) -> Iterable[str]:
    """The default as a line to uncomment, or else an example in prose."""
    if default is not None:
        yield f"#{key.name} = {toml_value(default)}"
    elif isinstance(key.example, dict):
        yield from (f"# {line}" for line in _entries(key.example))
    else:
        yield f"# {key.name} = {toml_value(key.example)}"


# ---- key by key ----------------------------------------------------------------------------------


class KeyExplanation(msgspec.Struct, frozen=True):
    """One key, or one entry of a table. ``shown`` is the value as TOML, ``origin`` its place."""

    key: str
    value: Value
    shown: str
    origin: str
    doc: str
    rule: str


def explanations(config: Config) -> list[KeyExplanation]:
    """All keys in the order of the schema, the entries of a table below it."""
    out: list[KeyExplanation] = []
    for key in KEYS.values():
        value = value_of(config, key)
        out.append(_row(config, key, key.path, value))
        if key.kind is KeyKind.TABLE:
            table = cast("dict[str, str]", value)
            out += [_row(config, key, f"{key.path}.{name}", table[name]) for name in table]
    return out


def _row(config: Config, key: ConfigKey, path: str, value: Value) -> KeyExplanation:
    return KeyExplanation(
        key=path,
        value=value,
        shown="(left out)" if value is None else toml_value(value),
        origin=config.origins[path].place,
        doc=key.doc,
        rule=key.rule,
    )


# ---- what differs --------------------------------------------------------------------------------


class KeyChange(msgspec.Struct, frozen=True):
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


def changes(before: Config, after: Config) -> list[KeyChange]:
    """Everything that differs, in the order of the schema."""
    return [change for key in KEYS.values() for change in _of_key(key, before, after)]


def with_changes(config: Config, taken: list[KeyChange]) -> Config:
    """``config`` with the values after these changes."""
    for change in taken:
        key = KEYS[change.key]
        section = field_of(key.section)
        value = change.after
        if change.entry is not None:
            table = {**cast("dict[str, str]", value_of(config, key))}
            table.pop(change.entry, None)
            if change.after is not None:
                table[change.entry] = cast("str", change.after)
            value = table
        replaced = msgspec.structs.replace(getattr(config, section), **{key.name: value})
        config = msgspec.structs.replace(config, **{section: replaced})
    return config


def _of_key(key: ConfigKey, before: Config, after: Config) -> Iterator[KeyChange]:
    was, is_now = value_of(before, key), value_of(after, key)
    if was == is_now:
        return
    if key.kind is not KeyKind.TABLE:
        yield KeyChange(key.path, was, is_now)
        return
    old, new = cast("dict[str, str]", was), cast("dict[str, str]", is_now)
    for entry in {**old, **new}:
        if old.get(entry) != new.get(entry):
            yield KeyChange(key=key.path, before=old.get(entry), after=new.get(entry), entry=entry)


# ---- for a store ---------------------------------------------------------------------------------

DAY_S = 86_400.0


def lifecycle(config: Config) -> dict[str, object]:
    """A lifecycle configuration of S3 for ``tiers.store``: nothing of it is removed too early.

    S3 counts whole days, and removes at their end or later.
    """
    store = config.tiers_store
    prefix = f"{store.prefix}/" if store.prefix is not None else ""
    rule = {
        "ID": f"kvd {store.prefix or 'of the whole bucket'}",
        "Filter": {"Prefix": prefix},
        "Status": "Enabled",
        "Expiration": {"Days": max(1, math.ceil(store.ttl_s / DAY_S))},
    }
    return {"Rules": [rule]}
