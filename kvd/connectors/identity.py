"""What KV is of, part by part: the digest that no unlike engine has.

Every connector gathers what decides the values of its engine's KV (weights, configuration, types,
packing) as parts, each as text that two equal values both have. The digest of all is in the name of
a namespace. What cannot be described is a random number: such an engine shares with nobody.

Nothing here imports an engine: its objects are read by the names of their fields.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvd.connectors.attributes import attribute

if TYPE_CHECKING:
    from collections.abc import Callable

MEMBER: Final = "#"
"""Between a base and what tells its members apart."""

DIGEST_CHARS: Final = 24
"""Of a SHA-256 in hexadecimal: 96 bits."""

PLAIN: Final = re.compile(r"[^A-Za-z0-9._+-]+")

SAID_CHARS: Final = 64
"""A part is logged as it is up to here, and by its digest above."""

NOTHING: Final = frozenset({"null", '""', "{}", "[null, null]"})
"""Parts that an engine does not have."""

CONFIG_APART: Final = frozenset({"_name_or_path", "name_or_path", "transformers_version"})
"""Of a configuration of transformers, at any depth."""


class UnknownWeights(Exception):
    """Nobody can say which weights these are, and why."""


class Indescribable(TypeError):
    """There is no text that two equal values of this type both have."""


class EngineIdentity(msgspec.Struct, frozen=True):
    """Of an engine. ``alone``: why nobody else has its name, not even itself once restarted."""

    namespace: str
    parts: dict[str, str]
    """By name, as JSON; of these the namespace is the digest."""
    alone: tuple[str, ...] = ()

    def in_words(self) -> str:
        """For a log line: two engines that differ in the name differ in a part."""
        told = {name: _short(text) for name, text in self.parts.items() if text not in NOTHING}
        return ", ".join(f"{name}={text}" for name, text in told.items())


def _short(text: str) -> str:
    text = text.strip('"')
    return text if len(text) <= SAID_CHARS else digest_of(text)[:8]


def digest_of(text: str) -> str:
    """So much of a hash tells it from others."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_CHARS]


def plain(text: str, most: int) -> str:
    """What can be read of it in a name: no space, no control character, no ``#``."""
    return PLAIN.sub("_", text)[:most]


# ---- of values ---------------------------------------------------------------------------------


def described(value: Any, *, apart: frozenset[str] = frozenset()) -> Any:  # noqa: PLR0911
    """A value of a configuration as JSON has it: equal for equal ones, in every process.

    Args:
        value: of any type that vLLM and transformers have in theirs.
        apart: its own fields that are left out.

    Raises:
        Indescribable: a function, or an object that shows no fields.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, bytes | bytearray):
        return value.hex()
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, list | tuple):
        return [described(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(described(item), sort_keys=True) for item in value)
    if type(value).__module__ == "torch" and type(value).__name__ in {"dtype", "device", "Size"}:
        return str(value)
    return _described_fields(value, apart)


def _described_fields(value: Any, apart: frozenset[str]) -> Any:
    fields = fields_of(value)
    if fields is None:
        raise Indescribable(f"a {type(value).__qualname__} cannot be described")
    left = {str(key): described(item) for key, item in fields.items() if key not in apart}
    return {key: left[key] for key in sorted(left)}


def fields_of(value: Any) -> Mapping[Any, Any] | None:
    """By name, where it is a mapping or shows its fields; None: it does not."""
    if isinstance(value, Mapping):
        return value
    methods = dir(type(value))
    # Of transformers, whose configurations have more than their fields; and of pydantic.
    for method in ("to_dict", "model_dump"):
        if method in methods:
            found: Mapping[Any, Any] = _without_places(getattr(value, method)())
            return found
    if dataclasses.is_dataclass(value):
        kind = {"": type(value).__name__}
        return kind | {
            field.name: attribute(value, field.name) for field in dataclasses.fields(value)
        }
    return None


def _without_places(found: Any) -> Any:
    """Where a configuration was read, and by what: one within another has that too."""
    if not isinstance(found, Mapping):
        return found
    left = {key: item for key, item in found.items() if key not in CONFIG_APART}
    return {key: _without_places(item) for key, item in left.items()}


class IdentityParts:
    """What was found, part by part; what cannot be is a random number."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.alone: list[str] = []

    def add(self, name: str, make: Callable[[], object]) -> None:
        """One more, as ``make`` says it."""
        try:
            part = make()
        except (UnknownWeights, AttributeError, TypeError, ValueError) as error:
            self.alone.append(f"{name}: {error}")
            part = f"unknown {secrets.token_hex(8)}"
        self.found[name] = json.dumps(part, sort_keys=True)

    def digest(self) -> str:
        """Of all of them."""
        return digest_of(json.dumps(self.found, sort_keys=True))
