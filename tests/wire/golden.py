"""The bytes of every member of every wire union: ``python -m tests.wire.golden`` writes them.

Each member is made twice from its field types alone: with every field set (``full``), and with the
fields that have no default (``least``). So a class or a field may get another name, and the bytes
say whether the wire noticed; a value that a field takes is drawn from the field's position.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from msgspec import inspect

from kvd.wire import admin, client, events, peer
from kvd.wire.attach import AttachReply, AttachRequest
from kvd.wire.numbered_event import NumberedEvent

FILE = Path(__file__).parent / "golden.json"

UNIONS = {
    "client requests": client.Request,
    "client replies": client.Reply | client.Several,
    "attach requests": AttachRequest,
    "attach replies": AttachReply,
    "peer messages": peer.Message,
    "admin requests": admin.AdminRequest,
    "admin replies": admin.AdminReply,
    "events": events.Event,
}


def sample(kind: inspect.Type, salt: int) -> object:  # noqa: C901 - one case a type
    """A value of that type; ``salt`` makes the values of neighbouring fields differ."""
    match kind:
        case inspect.IntType(ge=least, le=most):
            value = 3 + 7 * salt
            return min(max(value, least if least is not None else value), most or value)
        case inspect.FloatType():
            return 0.5 + salt
        case inspect.StrType(max_length=most):
            return f"text {salt}"[:most]
        case inspect.BytesType(max_length=most):
            return bytes([salt % 256, 1, 2, 3])[:most]
        case inspect.BoolType():
            return True
        case inspect.NoneType():
            return None
        case inspect.EnumType(cls=cls):
            return list(cls)[salt % len(cls)]
        case inspect.LiteralType(values=values):
            return values[salt % len(values)]
        case inspect.UnionType(types=types):
            return sample(next(t for t in types if not isinstance(t, inspect.NoneType)), salt)
        case inspect.VarTupleType(item_type=item):
            return (sample(item, salt), sample(item, salt + 1))
        case inspect.TupleType(item_types=items):
            return tuple(sample(item, salt + k) for k, item in enumerate(items))
        case inspect.ListType(item_type=item):
            return [sample(item, salt)]
        case inspect.DictType(key_type=key, value_type=value):
            return {sample(key, salt): sample(value, salt)}
        case inspect.StructType(cls=cls):
            return made(cls, is_full=True, salt=salt)
        case inspect.AnyType() | inspect.RawType():
            return {"any": salt}
    raise TypeError(f"no sample of {kind}: say here what one is")


STAMPED = frozenset(NumberedEvent.__struct_fields__)
"""What is on the wire with every event, though whoever makes one leaves it to the outbox."""


def made(cls: type[msgspec.Struct], *, is_full: bool, salt: int = 0) -> msgspec.Struct:
    """A member with every field set, or with those alone that must be."""
    kind = inspect.type_info(cls)
    assert isinstance(kind, inspect.StructType)
    return cls(
        **{
            field.name: sample(field.type, salt + position)
            for position, field in enumerate(kind.fields)
            if is_full or field.required or field.name in STAMPED
        }
    )


def members(union: object) -> list[type[msgspec.Struct]]:
    """The classes of a union, in its order."""
    kind = inspect.type_info(union)
    assert isinstance(kind, inspect.UnionType)
    return [one.cls for one in kind.types if isinstance(one, inspect.StructType)]


def written() -> dict[str, dict[str, dict[str, str]]]:
    """By union and tag: both forms, in hex."""
    return {
        name: {
            str(cls.__struct_config__.tag): {
                form: msgspec.msgpack.encode(made(cls, is_full=form == "full")).hex()
                for form in ("full", "least")
            }
            for cls in members(union)
        }
        for name, union in UNIONS.items()
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(written(), indent=1) + "\n", encoding="utf-8")
