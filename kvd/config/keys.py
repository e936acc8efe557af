"""The keys of the schema as a table: path, kind, type, default, documentation, rule.

Everything that treats keys alike (sources, ``explain``, the example file) reads this table, so a
field added to the schema needs no second mention.
"""

from __future__ import annotations

import difflib
import enum
from typing import get_args

import msgspec
from msgspec import inspect, structs

from kvd.config.schema import SECTIONS

Value = str | int | float | bool | tuple[str, ...] | dict[str, str] | None


class Kind(enum.Enum):
    """The shape of a value, as the rule names it."""

    TEXT = "a text"
    CHOICE = "one of several texts"
    INTEGER = "a whole number"
    NUMBER = "a number"
    BOOLEAN = "true or false"
    LIST = "a list of texts"
    TABLE = "a table of texts"


class Key(msgspec.Struct, frozen=True):
    """One key. ``annotation`` is what msgspec converts a value to; ``choices`` are for CHOICE."""

    path: str
    kind: Kind
    annotation: object
    default: Value
    doc: str
    rule: str
    choices: tuple[str, ...] = ()
    example: Value = None
    """What to show where there is no default."""

    @property
    def section(self) -> str:
        """The table that the key stands in."""
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        """The key inside its table."""
        return self.path.partition(".")[2]


def _key(section: str, field: inspect.Field, annotation: object) -> Key:
    """One row of the table from one field of the schema."""
    described = field.type
    plain = annotation
    if isinstance(described, inspect.UnionType):
        described = next(t for t in described.types if isinstance(t, inspect.Metadata))
        plain = next(one for one in get_args(annotation) if one is not type(None))
    assert isinstance(described, inspect.Metadata)
    kind, rule = _shape(described.type)
    choices: tuple[str, ...] = ()
    if kind is Kind.CHOICE:  # msgspec sorts them; they are shown in the order of the schema
        choices = get_args(get_args(plain)[0])
        rule = ", ".join(choices)
    extra = described.extra or {}
    schema = described.extra_json_schema or {}
    default: Value = None
    if field.default_factory is not msgspec.NODEFAULT:
        default = {}
    elif field.default is not msgspec.NODEFAULT:
        default = field.default
    return Key(
        path=f"{section}.{field.name}",
        kind=kind,
        annotation=annotation,
        default=default,
        doc=schema["description"],
        rule=extra.get("rule", rule),
        choices=choices,
        example=schema.get("examples", [None])[0],
    )


_PLAIN: dict[type[inspect.Type], Kind] = {
    inspect.BoolType: Kind.BOOLEAN,
    inspect.DictType: Kind.TABLE,
    inspect.LiteralType: Kind.CHOICE,
    inspect.StrType: Kind.TEXT,
    inspect.VarTupleType: Kind.LIST,
}


def _shape(shape: inspect.Type) -> tuple[Kind, str]:
    """Kind and derived rule of a field's type."""
    match shape:
        case inspect.IntType(ge=low, le=high):
            return Kind.INTEGER, f"a whole number from {low} to {high}"
        case inspect.FloatType(ge=low, le=high):
            return Kind.NUMBER, f"a number from {low} to {high}"
        case _:
            kind = _PLAIN[type(shape)]
            return kind, kind.value


def _table() -> dict[str, Key]:
    """Every key by its path, in the order of the schema."""
    table: dict[str, Key] = {}
    for section, struct in SECTIONS.items():
        described = inspect.type_info(struct)
        assert isinstance(described, inspect.StructType)
        for field, declared in zip(described.fields, structs.fields(struct), strict=True):
            key = _key(section, field, declared.type)
            table[key.path] = key
    return table


KEYS = _table()
"""Every key by its path, in the order of the schema."""


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
