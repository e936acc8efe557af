"""Reading the sources: TOML files, environment variables and ``--set``, as assignments.

An assignment is one key, one raw value and where it stands. Nothing is checked here beyond what
makes a source readable at all; ``load`` resolves and checks them in order.

tomllib gives no line numbers, so ``line_numbers`` scans the text for the line on which each key
stands. It need not be a parser: a key it cannot place is reported with the line of its table.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from typing import TYPE_CHECKING, Final

import msgspec

from kvd.config.keys import KEYS, KeyKind
from kvd.config.origin import ConfigError, ValueOrigin, ValueSource
from kvd.config.schema import SECTIONS
from kvd.curve import is_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

PREFIX = "KVD_"

SECRET = "peers.secret_key_file"
HIDDEN = "(a key, not shown)"
"""What errors and origins say where somebody gave the secret key itself instead of its file."""


class Assignment(msgspec.Struct, frozen=True):
    """``key`` = ``value`` at ``origin``; ``entry`` is the name inside a table such as connect.

    ``key`` may be unknown. Values from files keep their TOML type, the others are text.
    """

    key: str
    value: object
    origin: ValueOrigin
    entry: str | None = None

    @property
    def subject(self) -> str:
        """ConfigKey and entry as one dotted name."""
        return self.key if self.entry is None else f"{self.key}.{self.entry}"

    @property
    def quoted(self) -> str:
        """The value as it stands in its source."""
        if self.key == SECRET and is_key(str(self.value)):
            return HIDDEN
        if self.origin.source is ValueSource.FILE:
            return shown(self.value)
        return readable(str(self.value))

    def error(self, rule: str, fix: str) -> ConfigError:
        """That it cannot be taken, and what to do about it."""
        return ConfigError(
            where=self.origin.place, key=self.subject, value=self.quoted, rule=rule, fix=fix
        )


Found = list["Assignment | ConfigError"]
"""What one source says, and what in it cannot be read."""


def read_file(path: Path) -> Found:
    """One TOML file, which must exist."""
    where, fix = str(path), "give the path of a readable TOML file"
    try:
        text = path.read_text(encoding="utf-8")
        parsed = tomllib.loads(text)
    except OSError as failure:
        rule = f"cannot be read: {failure.strerror}"
    except UnicodeDecodeError as failure:
        rule = f"is not UTF-8: byte {failure.start} is out of place"
    except RecursionError:
        rule = "is nested too deeply"
    except ValueError as failure:  # TOMLDecodeError, or an integer of thousands of digits
        place = re.search(r"\(at line (\d+), column \d+\)", str(failure))
        where = f"{path}:{place[1]}" if place else where
        rule = f"is not TOML: {re.sub(r' [(]at .*[)]$', '', str(failure))}"
        fix = "correct the syntax"
    else:
        place_of = (where, line_numbers(text))
        return [
            value
            for section, content in parsed.items()
            for value in _section(section, content, place_of)
        ]
    return [ConfigError(where=where, rule=rule, fix=fix)]


Place = tuple[str, dict[tuple[str, ...], int]]
"""A file and the lines of its keys."""


def _section(section: str, content: object, place: Place) -> Iterator[Assignment]:
    """The assignments of one table of a file, and of those in it that are sections too."""
    above = tuple(section.split("."))
    if not isinstance(content, dict):
        yield Assignment(section, content, _origin(place, above))
        return
    for name, value in content.items():
        path = f"{section}.{name}"
        if path in SECTIONS and isinstance(value, dict):
            yield from _section(path, value, place)
            continue
        known = KEYS.get(path)
        if known is not None and known.kind is KeyKind.TABLE and isinstance(value, dict):
            for entry, item in value.items():
                origin = _origin(place, (*above, name, entry))
                yield Assignment(path, item, origin, entry=entry)
        else:
            yield Assignment(path, value, _origin(place, (*above, name)))


def _origin(place: Place, path: tuple[str, ...]) -> ValueOrigin:
    """Where ``path`` stands: its own line, else that of the nearest table around it."""
    name, lines = place
    for length in range(len(path), 0, -1):
        line = lines.get(path[:length])
        if line is not None:
            return ValueOrigin(ValueSource.FILE, name, line)
    return ValueOrigin(ValueSource.FILE, name)


_BARE = r"[A-Za-z0-9_-]+"
_PART = rf"(?:{_BARE}|\"(?:[^\"\\]|\\.)*\"|'[^']*')"
_DOTTED = rf"{_PART}(?:\s*\.\s*{_PART})*"
_HEADER = re.compile(rf"^\s*\[\[?\s*({_DOTTED})\s*\]\]?")
_PAIR = re.compile(rf"^\s*({_DOTTED})\s*=\s*(.*)$")


def line_numbers(text: str) -> dict[tuple[str, ...], int]:
    """The line (from 1) of each table and key of a TOML text, by path; the last one wins."""
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    closing = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if closing:
            closing = "" if closing in line else closing
            continue
        if header := _HEADER.match(line):
            table = _parts(header[1])
            lines[table] = number
        elif pair := _PAIR.match(line):
            path = (*table, *_parts(pair[1]))
            for length in range(len(table) + 1, len(path)):
                lines.setdefault(path[:length], number)
            lines[path] = number
            closing = _opened(pair[2])
    return lines


def _parts(dotted: str) -> tuple[str, ...]:
    """``a."b.c"`` as ``("a", "b.c")``."""
    return tuple(_unquoted(part) for part in re.findall(_PART, dotted))


def _unquoted(part: str) -> str:
    """A key without its quotes."""
    if part.startswith("'"):
        return part[1:-1]
    if part.startswith('"'):
        try:
            return str(json.loads(part))
        except ValueError:
            return part[1:-1]
    return part


def _opened(value: str) -> str:
    """The quotes that end a multi-line text which ``value`` begins; empty if it begins none."""
    for quotes in ('"""', "'''"):
        if value.startswith(quotes) and quotes not in value[3:]:
            return quotes
    return ""


def read_environment(environ: Mapping[str, str]) -> Found:
    """Variables named ``KVD_SECTION__KEY``, and ``KVD_SECTION__KEY__entry`` for tables.

    One without the two underscores that looks like a key, written together or with a letter wrong,
    is an error: it would never be read. Others that begin so may be somebody else's.
    """
    found: Found = []
    meant = {_together(key): key for key in KEYS}
    for name in sorted(variable for variable in environ if variable.startswith(PREFIX)):
        section, separator, rest = name.removeprefix(PREFIX).partition("__")
        if separator:
            origin = ValueOrigin(ValueSource.ENVIRONMENT, name)
            key, entry = _split(f"{section.lower()}.", rest, "__")
            found.append(Assignment(key.lower(), environ[name], origin, entry=entry))
            continue
        close = difflib.get_close_matches(_together(section), meant, n=1, cutoff=_LOOKS_LIKE)
        if close:
            key = meant[close[0]]
            found.append(
                ConfigError(
                    where=name,
                    key=key,
                    value=readable(environ[name]),
                    rule="two underscores part section and key",
                    fix=f"name it {PREFIX}{key.replace('.', '__').upper()}",
                )
            )
    return found


_LOOKS_LIKE: Final = 0.85
"""How alike two names are that differ by a letter or two."""


def _together(name: str) -> str:
    return re.sub(r"[._]", "", name).upper()


def read_sets(sets: Sequence[str]) -> Found:
    """``section.key=value`` texts, and ``section.key.entry=value`` for tables."""
    found: Found = []
    for text in sets:
        path, separator, value = text.partition("=")
        is_secret = path.strip() == SECRET and is_key(value.strip())
        origin = ValueOrigin(ValueSource.SET, f"{SECRET}={HIDDEN}" if is_secret else text)
        if not separator or "." not in path:
            rule, fix = "has the form section.key=value", "write for example --set pool.pages=1024"
            found.append(ConfigError(where=origin.place, rule=rule, fix=fix))
            continue
        section, _, rest = path.strip().partition(".")
        key, entry = _split(f"{section}.", rest, ".")
        found.append(Assignment(key, value.strip(), origin, entry=entry))
    return found


def _split(section: str, rest: str, separator: str) -> tuple[str, str | None]:
    """ConfigKey and entry of ``rest``; only the keys that are tables have entries."""
    parts = rest.split(separator)
    # A section may have two names, as [tiers.disk] has.
    for last in (1, 2):
        known = KEYS.get(f"{section}{'.'.join(parts[:last]).lower()}")
        if len(parts) > last and known is not None and known.kind is KeyKind.TABLE:
            return known.path, separator.join(parts[last:])
    return f"{section}{rest.replace(separator, '.')}", None


def shown(value: object) -> str:
    """A raw value as an error quotes it: TOML's own spelling, cut to a readable length."""
    match value:
        case bool():
            text = "true" if value else "false"
        case str():
            text = json.dumps(value, ensure_ascii=False)
        case list() | tuple():
            text = f"[{', '.join(shown(item) for item in value)}]"
        case dict():
            pairs = (f"{name} = {shown(item)}" for name, item in value.items())
            text = f"{{ {', '.join(pairs)} }}"
        case _:
            text = str(value)
    return readable(text)


def readable(text: str) -> str:
    """A text that any terminal takes, cut to a length that fits an error."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 120 else f"{text[:117]}..."
