"""The keys of the schema as a table: path, kind, type, default, documentation, rule.

Everything that treats keys alike (sources, ``explain``, the example file) reads this table, so a
field added to the schema needs no second mention.
"""

from __future__ import annotations

import ast
import difflib
import enum
import functools
import inspect as source
import itertools
from typing import TYPE_CHECKING, Literal, cast, get_args, get_origin

import msgspec
from msgspec import inspect, structs

from kvd.config.schema import SECTIONS, field_of
from kvd.families import POOLS, Value
from kvd.families.family import INDEX, among

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.config.schema import Config


class KeyKind(enum.Enum):
    """The shape of a value, as the rule names it."""

    TEXT = "a text"
    CHOICE = "one of several texts"
    INTEGER = "a whole number"
    NUMBER = "a number"
    BOOLEAN = "true or false"
    LIST = "a list of texts"
    TABLE = "a table of texts"


class ConfigKey(msgspec.Struct, frozen=True):
    """One key. ``annotation`` is what msgspec converts a value to; ``choices`` are for CHOICE."""

    path: str
    kind: KeyKind
    annotation: object
    default: Value
    rule: str
    choices: tuple[str, ...] = ()
    example: Value = None
    """What to show where there is no default."""

    @property
    def section(self) -> str:
        """The table that the key stands in."""
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The key inside its table."""
        return self.path.rpartition(".")[2]

    @property
    def doc(self) -> str:
        """What it means, with the families that it is about."""
        return _docs()[self.path]


def _key(section: str, field: inspect.Field, annotation: object) -> ConfigKey:
    """One row of the table from one field of a section."""
    value_type, extra, examples = field.type, {}, [None]
    if isinstance(value_type, inspect.Metadata):
        extra = value_type.extra or {}
        examples = (value_type.extra_json_schema or {}).get("examples", examples)
        value_type = value_type.type
    if isinstance(value_type, inspect.UnionType):
        value_type = next(t for t in value_type.types if not isinstance(t, inspect.NoneType))
    kind, rule = _shape(value_type)
    path = f"{section}.{field.name}"
    choices = tuple(POOLS) if path == "pool.family" else _choices(annotation)
    if choices:
        kind, rule = KeyKind.CHOICE, ", ".join(choices)
        annotation = Literal[choices]
    default: Value = None
    if field.default_factory is not msgspec.NODEFAULT:
        default = {}
    elif field.default is not msgspec.NODEFAULT:
        default = field.default
    return ConfigKey(
        path=path,
        kind=kind,
        annotation=annotation,
        default=default,
        rule=extra.get("rule", rule),
        choices=choices,
        example=examples[0],
    )


def _choices(annotation: object) -> tuple[str, ...]:
    """In the order of the schema, where msgspec would sort them; empty where there are none."""
    while get_origin(annotation) not in {Literal, None}:
        annotation = get_args(annotation)[0]
    return get_args(annotation)


_PLAIN: dict[type[inspect.Type], KeyKind] = {
    inspect.BoolType: KeyKind.BOOLEAN,
    inspect.DictType: KeyKind.TABLE,
    inspect.LiteralType: KeyKind.CHOICE,
    inspect.StrType: KeyKind.TEXT,
    inspect.VarTupleType: KeyKind.LIST,
}


def _shape(shape: inspect.Type) -> tuple[KeyKind, str]:
    """Kind and derived rule of a field's type."""
    match shape:
        case inspect.IntType(ge=low, le=high):
            return KeyKind.INTEGER, f"a whole number from {low} to {high}"
        case inspect.FloatType(ge=None, gt=low, le=high):
            return KeyKind.NUMBER, f"a number above {low}, at most {high}"
        case inspect.FloatType(ge=low, le=high):
            return KeyKind.NUMBER, f"a number from {low} to {high}"
        case _:
            kind = _PLAIN[type(shape)]
            return kind, kind.value


def _structs() -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Sections with their structs, in the order of the schema; families' own keys end [pool]."""
    for section, struct in SECTIONS.items():
        yield section, struct
        if section == "pool":
            yield from ((section, row.section) for row in POOLS.values())


def _table() -> dict[str, ConfigKey]:
    table: dict[str, ConfigKey] = {}
    # A family's section begins with all that is common, which is in the table by then.
    for section, struct in _structs():
        described = inspect.type_info(struct)
        assert isinstance(described, inspect.StructType)
        for field, declared in zip(described.fields, structs.fields(struct), strict=True):
            if f"{section}.{field.name}" not in table:
                key = _key(section, field, declared.type)
                table[key.path] = key
    return table


KEYS = _table()
"""Every key by its path, in the order of the schema."""


@functools.cache
def _docs() -> dict[str, str]:
    """What stands below each field, by key: read when somebody asks, which no daemon does."""
    indexed = ", ".join(name for name, row in POOLS.items() if INDEX in row.groups)
    cut = among([name for name, row in POOLS.items() if not row.unsharded])
    owned = "; ".join(f"{name} {row.owns}" for name, row in POOLS.items())
    docs = {
        f"{section}.{name}": doc.replace("{index}", indexed).replace("{shards}", cut)
        for section, struct in _structs()
        for name, doc in _field_docs(struct).items()
    }
    return docs | {"pool.family": docs["pool.family"].replace("{families}", owned)}


def _field_docs(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The string below each field of the class itself, as one line."""
    body = ast.parse(source.getsource(struct)).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: " ".join(str(below.value.value).split())
        for field, below in itertools.pairwise(body.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }


def value_of(config: Config, key: ConfigKey) -> Value:
    """The effective value of one key; its default where another family has it."""
    section = msgspec.structs.asdict(config)[field_of(key.section)]
    return cast("Value", msgspec.structs.asdict(section).get(key.name, key.default))


def nearest(path: str) -> str | None:
    """The known key that ``path`` was probably meant to be: a typo, or the wrong section."""
    close = difflib.get_close_matches(path, KEYS, n=1, cutoff=0.8)
    if close:
        return close[0]
    name = path.rpartition(".")[2]
    same = [key.path for key in KEYS.values() if key.name == name]
    if same:
        return same[0]
    close = difflib.get_close_matches(path, KEYS, n=1, cutoff=0.6)
    return close[0] if close else None
