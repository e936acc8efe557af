"""Putting the sources together: the strongest value of every key, checked, with its origin.

Sources, weakest first: built-in defaults, /etc/kvd/kvd.toml (or ``--config FILE``), conf.d/*.toml
beside it in the order of their names, ``KVD_SECTION__KEY``, ``--set section.key=value``.

Every finding of every source comes out in one list: a wrong value is an error even where a
stronger source would override it, and for the rules over several keys it is replaced by its
default and left alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from kvd.config.host import HostFacts, this_host
from kvd.config.keys import KEYS, ConfigKey, KeyKind, nearest
from kvd.config.origin import DEFAULT, ConfigError, ValueOrigin, ValueSource
from kvd.config.rules import RULES, entry_flaw, flaw_of, reason_not_built
from kvd.config.schema import SECTIONS, Config, field_of
from kvd.config.sources import Assignment, Found, read_environment, read_file, read_sets, shown
from kvd.families import POOLS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvd.families import Breach, Value

EXCLUSIVE = {"pool.pages": "pool.size", "pool.size": "pool.pages"}
"""Two ways to say one thing: not both in one source; a stronger source replaces the other."""


def load(
    config_file: Path | None,
    environ: Mapping[str, str],
    sets: Sequence[str],
    *,
    host: HostFacts | None = None,
) -> Config | list[ConfigError]:
    """The effective configuration, or everything that is wrong with it.

    Args:
        config_file: read instead of /etc/kvd/kvd.toml; must exist if given.
        environ: the environment; only ``KVD_*`` and, for defaults, XDG_RUNTIME_DIR are read.
        sets: ``section.key=value`` texts, strongest last.
        host: what the defaults depend on; this host if left out.
    """
    host = this_host(environ) if host is None else host
    files = _files(config_file, Path(host.config_file))
    sources = [*files, read_environment(environ), read_sets(sets)]
    draft = _Draft(host)
    for source in sources:
        draft.take(source)
    config = draft.config()
    for rule in RULES:
        # A rule over a value that stands in for a wrong one would blame what nobody wrote.
        if not rule.needs & draft.wrong:
            draft.errors += [draft.error(finding) for finding in rule.check(config)]
    return draft.errors or config


def _files(chosen: Path | None, usual: Path) -> list[Found]:
    """The main file and those of conf.d; the usual file need not exist."""
    main = usual if chosen is None else chosen
    paths = [main] if chosen is not None or _is_there(usual) else []
    paths += sorted((main.parent / "conf.d").glob("*.toml"))
    return [read_file(path) for path in paths]


def _is_there(path: Path) -> bool:
    """Whether there is a file, even one that cannot be read: reading it will say why."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def host_defaults(host: HostFacts) -> dict[str, Value]:
    """The defaults that depend on the host."""
    return {
        "node.name": host.node_name,
        "sockets.client": f"ipc://{host.runtime}/client.sock",
        "sockets.admin": f"ipc://{host.runtime}/admin.sock",
        "sockets.group": host.group,
    }


class _Flaw(msgspec.Struct, frozen=True):
    """Why a value cannot be taken, and what to do about it."""

    rule: str
    fix: str


class _Draft:
    """Values so far by key, where they came from, and what was wrong.

    ``wrong`` are the keys whose value is a stand-in because a source gave an invalid one.
    """

    def __init__(self, host: HostFacts) -> None:
        self.values: dict[str, Value] = {key.path: key.default for key in KEYS.values()}
        self.values |= host_defaults(host)
        self.origins: dict[str, ValueOrigin] = dict.fromkeys(KEYS, DEFAULT)
        self.errors: list[ConfigError] = []
        self.wrong: set[str] = set()

    def take(self, source: Found) -> None:
        """Let one source override what weaker ones said; what cannot be read is told first."""
        self.errors += [item for item in source if isinstance(item, ConfigError)]
        taken: set[str] = set()
        for assignment in source:
            if isinstance(assignment, ConfigError):
                continue
            key = KEYS.get(assignment.key)
            if key is None:
                self.errors.append(_unknown(assignment))
                continue
            other = EXCLUSIVE.get(key.path)
            if other in taken:
                rule = f"excludes {other}, which {self.origins[str(other)].place} gives"
                flaw: _Flaw | None = _Flaw(rule, "keep one of them")
            else:
                flaw = self._assign(key, assignment)
            if flaw is not None:
                self.errors.append(assignment.error(flaw.rule, flaw.fix))
                if assignment.entry is None:
                    self.wrong.add(key.path)
            # Even when it was refused: its other spelling in this source is still a clash.
            taken.add(key.path)

    def _assign(self, key: ConfigKey, assignment: Assignment) -> _Flaw | None:
        """Take the value, or say what is wrong with it."""
        if key.kind is KeyKind.TABLE:
            return self._assign_entry(key, assignment)
        value = _converted(key, assignment)
        if isinstance(value, _Flaw):
            return value
        self.values[key.path] = value
        self.origins[key.path] = assignment.origin
        if key.path in EXCLUSIVE:
            # The default of pool.size must go too, or pool.pages could never be given alone.
            self.values[EXCLUSIVE[key.path]] = None
            self.origins[EXCLUSIVE[key.path]] = assignment.origin
        return None

    def _assign_entry(self, key: ConfigKey, assignment: Assignment) -> _Flaw | None:
        """Take one entry of a table, or say what is wrong with it."""
        entry, value = assignment.entry, assignment.value
        if entry is None:
            return _Flaw(f"must be {key.rule}", _entry_form(key, assignment.origin))
        fix = entry_flaw(key.path, entry)
        if fix is None and isinstance(value, str):
            fix = flaw_of(key.path, value)
        elif fix is None:
            fix = "put the value in quotes"
        if fix is not None:
            return _Flaw(f"must be {key.rule.removeprefix('a table of ')}", fix)
        table = cast("dict[str, str]", self.values[key.path])
        self.values[key.path] = {**table, entry: cast("str", value)}
        self.origins[assignment.subject] = assignment.origin
        return None

    def error(self, finding: Breach) -> ConfigError:
        """A rule's finding with the value and the place that it is about."""
        subject, value = finding.key, self.values[finding.key]
        if finding.entry is not None:
            subject = f"{finding.key}.{finding.entry}"
            value = cast("dict[str, str]", value)[finding.entry]
        return ConfigError(
            where=self.origins[subject].place,
            key=subject,
            value=shown(value),
            rule=finding.rule,
            fix=finding.fix,
        )

    def config(self) -> Config:
        """The values as typed sections."""
        sections: dict[str, dict[str, Value]] = {section: {} for section in SECTIONS}
        for key in KEYS.values():
            sections[key.section][key.name] = self.values[key.path]
        # A family's section has no field for the keys of others, and msgspec passes over those.
        types = SECTIONS | {"pool": POOLS[str(self.values["pool.family"])].section}
        built = {field_of(name): msgspec.convert(sections[name], types[name]) for name in SECTIONS}
        return Config(**built, origins=self.origins)  # type: ignore[arg-type]  # by SECTIONS


def _unknown(assignment: Assignment) -> ConfigError:
    """A key that does not exist, with the one that may have been meant."""
    path = assignment.key
    if path in SECTIONS:
        return assignment.error("is a table", f"open it with [{path}] and put its keys below")
    if path.startswith("quotas.store.floor"):
        why = "is no key of kvd: it removes nothing from a store, so what is there needs no floor"
        return assignment.error(why, "remove it; tiers.store.ttl_s says how long anything stays")
    meant = nearest(path)
    fix = "remove it; kvd config explain lists every key"
    return assignment.error("is no key of kvd", f"did you mean {meant}?" if meant else fix)


def _entry_form(key: ConfigKey, origin: ValueOrigin) -> str:
    """How one entry of a table is written in the source that ``origin`` names."""
    match origin.source:
        case ValueSource.ENVIRONMENT:
            return f"name one entry per variable: {origin.name}__NAME"
        case ValueSource.SET:
            return f"name one entry per --set: {key.path}.NAME=..."
        case ValueSource.FILE | ValueSource.DEFAULT:
            return f"open the table with [{key.path}]"


def _converted(key: ConfigKey, assignment: Assignment) -> Value | _Flaw:
    """The value in the type of its key, or what is wrong with it."""
    raw = assignment.value
    # TOML has types; a variable and --set are text, of which the key says what it is to be.
    if assignment.origin.source is not ValueSource.FILE:
        raw = _parsed(key.kind, str(raw))
    one_of = "one of " if key.kind is KeyKind.CHOICE and len(key.choices) > 1 else ""
    rule = f"must be {one_of}{key.rule}"
    # Before the type is judged: "must be one of" would not say why fp4 is none of them.
    reason = reason_not_built(key.path, raw)
    if reason is not None:
        built = [choice for choice in key.choices if reason_not_built(key.path, choice) is None]
        return _Flaw(f"is refused: {reason}", f"write {' or '.join(built)}")
    try:
        value: Value = msgspec.convert(raw, key.annotation)
    except msgspec.ValidationError:
        hint = f"the default is {shown(key.default)}"
        return _Flaw(rule, "leave it out if in doubt" if key.default is None else hint)
    texts = (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ()
    fix = next(filter(None, (flaw_of(key.path, text) for text in texts)), None)
    return value if fix is None else _Flaw(rule, fix)


def _parsed(kind: KeyKind, text: str) -> object:
    """A text from the environment or ``--set`` as its kind; the text itself if it is not one."""
    try:
        match kind:
            case KeyKind.INTEGER:
                return int(text)
            case KeyKind.NUMBER:
                return float(text)
            case KeyKind.BOOLEAN:
                return {"true": True, "false": False}.get(text, text)
            case KeyKind.LIST:
                return [item.strip() for item in text.split(",") if item.strip()]
            case KeyKind.TEXT | KeyKind.CHOICE | KeyKind.TABLE:
                return text
    except ValueError:
        return text
