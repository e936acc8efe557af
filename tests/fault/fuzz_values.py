"""Hostile frames, made by reflection over the message unions of the wire.

A field gets a value of its own type, often at one of its bounds; a mutant breaks the shape of a
message; a damaged frame breaks its bytes. New messages and new fields are covered without a change
here, because nothing here names one.
"""

from __future__ import annotations

import random
import typing

import msgspec
from msgspec import inspect

INT64 = 2**63 - 1
INTEGERS = (0, 1, 2, 3, 5, 7, 16, 40, 100, 101, 2**31 - 1, 2**31, 2**62, INT64)
WIDE = (-1, -16, -(2**31), -(2**62), -(2**63), 2**63, 2**64 - 1)
FLOATS = (0.0, 0.01, 0.05, 0.2, -1.0, 1e300, float("nan"), float("inf"), float("-inf"))
TEXTS = ("", "p", "d", "x", "kv", "lora", "\0", "\x1b[31m", "é" * 40, "strict", "unlocked")
TEXTS += ("page", "room", "lease", "node", "ffff", "{", "null")
BLOBS = (b"", b"\0" * 4, b"\1\0\0\0", b"abc", b"\xff" * 64, bytes(range(256)))
INTRUDERS = (None, True, -1, 2**63, 2**64 - 1, -(2**63), float("nan"), float("inf"), "text", b"")
INTRUDERS += ([], {}, [[[]]], {"type": "lease"}, {1: 2}, "\ud7ff", [None] * 40)
FOREIGN = (b"", b"\xc1", b"\xff" * 50, b"\x94" * 5000, b"\x81" * 5000, b"\xdf\xff\xff\xff\xff")
FOREIGN += (
    b"\xdd\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"GET / HTTP/1.1\r\n\r\n",
    bytes(70_000),
)
LONG = 200
"""Once in so many values a text, a blob or a tuple is as long as it may be."""
MOST_LONG = 70_000
"""Characters or bytes of what is long: beyond every bound but the one of a pool's layout."""

LIKELY = 0.85
"""How often a field has a value that means something."""

Builder = typing.Callable[[], object]


class Maker:
    """Values, messages and frames from one seed.

    ``known`` gives a field by its name values that mean something at the moment: ids of open
    leases, rooms, incarnations. They are taken more often than not.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.known: dict[str, list[object]] = {}
        self._builders: dict[type, list[tuple[str, Builder]]] = {}

    # ---- messages ----------------------------------------------------------------------------

    def fields(self, kind: type[msgspec.Struct], **fixed: object) -> dict[str, object]:
        """Every field of a message with a value that its type allows; ``fixed`` ones as given."""
        builders = self._builders.get(kind)
        if builders is None:
            builders = self._builders[kind] = [
                (one.name, self._builder(one.type)) for one in inspect.type_info(kind).fields
            ]
        made = {}
        for name, build in builders:
            known = self.known.get(name)
            if name in fixed:
                made[name] = fixed[name]
            elif known and self.rng.random() < LIKELY:
                made[name] = self.rng.choice(known)
            else:
                made[name] = build()
        return made

    def plausible(self, kind: type[msgspec.Struct], **fixed: object) -> bytes:
        """A frame of this kind whose fields are within their bounds."""
        return msgspec.msgpack.encode(_shape(kind, self.fields(kind, **fixed)))

    def mutant(self, kind: type[msgspec.Struct], **fixed: object) -> bytes:
        """A frame that is nearly of this kind: a wrong type, tag, bound or number of fields."""
        shape = _shape(kind, self.fields(kind, **fixed))
        for _ in range(self.rng.choice((1, 1, 1, 2, 4))):
            self._break(shape)
        return msgspec.msgpack.encode(shape)

    def damaged(self, whole: bytes) -> bytes:
        """The bytes of a frame after an accident on the way."""
        rng = self.rng
        raw = bytearray(whole)
        at = rng.randrange(len(raw) + 1)
        match rng.randrange(5):
            case 0:
                del raw[at:]
            case 1:
                for _ in range(rng.choice((1, 1, 2, 3, 8)) if raw else 0):
                    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            case 2:
                raw[at:at] = rng.randbytes(rng.choice((1, 2, 8)))
            case 3:
                del raw[at : at + rng.choice((1, 2, 8))]
            case _:
                raw += raw[: rng.randrange(len(raw) + 1)]
        return bytes(raw)

    def noise(self) -> bytes:
        """Bytes that are no message of anything."""
        if self.rng.random() < 0.1:
            return self.rng.choice(FOREIGN)
        return self.rng.randbytes(self.rng.choice((1, 2, 3, 8, 40, 300)))

    def frame(self, kind: type[msgspec.Struct], **fixed: object) -> bytes:
        """Anything of the above; about half of it can be read."""
        match self.rng.randrange(20):
            case 0:
                return self.noise()
            case 1 | 2 | 3:
                return self.damaged(self.plausible(kind, **fixed))
            case 4 | 5 | 6 | 7:
                return self.mutant(kind, **fixed)
            case _:
                return self.plausible(kind, **fixed)

    def _break(self, shape: list[object] | dict[object, object]) -> None:
        rng = self.rng
        if isinstance(shape, dict):
            shape[rng.choice((*shape, "more"))] = rng.choice(INTRUDERS)
            if rng.random() < 0.3:
                del shape[rng.choice(list(shape))]
            return
        at = rng.randrange(len(shape)) if shape else 0
        match rng.randrange(6):
            case 0:
                del shape[at:]
            case 1:
                shape.append(rng.choice(INTRUDERS))
            case 2 if shape:
                shape[0] = rng.choice(("", "lease", "hello", "status", "offer", 0, None, "no-such"))
            case 3 if shape:
                shape[at] = rng.choice(WIDE)
            case 4 if shape:
                shape[at] = rng.choice(("x" * MOST_LONG, bytes(MOST_LONG))) if not at % 4 else []
            case _ if shape:
                shape[at] = rng.choice(INTRUDERS)

    # ---- values ------------------------------------------------------------------------------

    def _builder(self, kind: inspect.Type) -> Builder:
        """What makes values of this type."""
        rng = self.rng
        match kind:
            case inspect.IntType(ge=low, le=high):
                allowed = [one for one in INTEGERS + WIDE if _within(one, low, high)]
                allowed += [one for one in (low, high) if one is not None]
                return lambda: rng.choice(allowed)
            case inspect.FloatType():
                return lambda: rng.choice(FLOATS)
            case inspect.StrType(max_length=longest):
                texts = [one for one in TEXTS if longest is None or len(one) <= longest]
                return lambda: rng.choice(texts) if self._is_short() else "x" * _long(longest)
            case inspect.BytesType(max_length=longest):
                blobs = [one for one in BLOBS if longest is None or len(one) <= longest]
                return lambda: rng.choice(blobs) if self._is_short() else bytes(_long(longest))
            case inspect.BoolType():
                return lambda: rng.random() < 0.5
            case inspect.NoneType():
                return lambda: None
            case inspect.EnumType(cls=members):
                values = [one.value for one in members]
                return lambda: rng.choice(values)
            case inspect.LiteralType(values=values):
                return lambda: rng.choice(values)
            case _:
                return self._compound(kind)

    def _compound(self, kind: inspect.Type) -> Builder:
        rng = self.rng
        match kind:
            case inspect.UnionType(types=types):
                builders = [self._builder(one) for one in types]
                return lambda: _made(rng.choice(builders))
            case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
                build = self._builder(item)
                return lambda: [build() for _ in range(self._length())]
            case inspect.TupleType(item_types=items):
                each = [self._builder(one) for one in items]
                return lambda: [build() for build in each]
            case inspect.DictType(key_type=key, value_type=value):
                keys, values = self._builder(key), self._builder(value)
                return lambda: {keys(): values() for _ in range(self._length())}
            case inspect.StructType(cls=cls):
                return lambda: _shape(cls, self.fields(cls))
            case _:
                raise NotImplementedError(kind)

    def _is_short(self) -> bool:
        return self.rng.randrange(LONG) > 0

    def _length(self) -> int:
        return self.rng.choice((0, 1, 1, 1, 2, 3)) if self._is_short() else 300


def _made(build: Builder) -> object:
    return build()


def _within(value: int, low: int | None, high: int | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def _long(longest: int | None) -> int:
    return MOST_LONG if longest is None else min(longest, MOST_LONG)


def _shape(
    kind: type[msgspec.Struct], fields: dict[str, object]
) -> list[object] | dict[object, object]:
    """A message as MessagePack sees it."""
    config = kind.__struct_config__
    if config.array_like:
        head = [] if config.tag is None else [config.tag]
        return [*head, *fields.values()]
    head = {} if config.tag is None else {config.tag_field: config.tag}
    return {**head, **fields}


def kinds_of(union: object) -> tuple[type[msgspec.Struct], ...]:
    return typing.get_args(union)
