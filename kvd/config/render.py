"""A configuration as TOML text: the effective one, and the example file with every default.

In the example a line ``#key = value`` is a default and ``# text`` is prose, as in sshd_config.
"""

from __future__ import annotations

import json
import re
import textwrap
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, cast

import msgspec

from kvd.config.families import is_of_use
from kvd.config.host import Host
from kvd.config.keys import KEYS, Key, Kind, Value
from kvd.config.load import host_defaults
from kvd.config.schema import SECTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvd.config.schema import Config

EXAMPLE_HOST = Host(node_name="node-0", runtime="/run/kvd")
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


def value_of(config: Config, key: Key) -> Value:
    """The effective value of one key."""
    section = msgspec.structs.asdict(config)[key.section]
    return cast("Value", msgspec.structs.asdict(section)[key.name])


def effective(config: Config) -> str:
    """The configuration as a file that gives the same anywhere; keys of other families left out."""
    blocks: list[str] = []
    for section in SECTIONS:
        plain, tables = _keys_of(section)
        lines = [f"[{section}]"]
        for key in plain:
            value = value_of(config, key)
            if value is not None and is_of_use(config, key.path):
                lines.append(f"{key.name} = {toml_value(value)}")
        blocks.append("\n".join(lines))
        for key in tables:
            table = cast("dict[str, str]", value_of(config, key))
            if table:
                blocks.append("\n".join([f"[{key.path}]", *_entries(table)]))
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
            line = _shown(key, defaults[key.path]) if set_to is None else (_set(key, set_to),)
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


def _keys_of(section: str) -> tuple[list[Key], list[Key]]:
    """The plain keys of a section and its tables, which TOML wants last."""
    keys = [key for key in KEYS.values() if key.section == section]
    tables = [key for key in keys if key.kind is Kind.TABLE]
    return [key for key in keys if key.kind is not Kind.TABLE], tables


def _prose(key: Key) -> list[str]:
    """Documentation and rule as comments."""
    return textwrap.wrap(
        f"{key.doc} Rule: {key.rule}.",
        width=98,
        initial_indent="# ",
        subsequent_indent="# ",
        break_on_hyphens=False,
    )


def _set(key: Key, value: Value) -> str:
    """A line that counts."""
    return f"{key.name} = {toml_value(value)}"


def _shown(key: Key, default: Value) -> Iterable[str]:
    """The default as a line to uncomment, or else an example in prose."""
    if default is not None:
        yield f"#{key.name} = {toml_value(default)}"
    elif isinstance(key.example, dict):
        yield from (f"# {line}" for line in _entries(key.example))
    else:
        yield f"# {key.name} = {toml_value(key.example)}"
