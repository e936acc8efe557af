"""Bytes into a node again: the opposite of ``freeze``.

The bytes may be damaged or hostile. Nothing is loaded or called that they name, but constructors of
frozen structs: instances are made empty and their attributes set; a method or function is only
referred to, and only if a class or module of ours has it. Memory is bounded by the length of the
bytes, some sixty times of it at worst. What an attribute holds is not checked against its type: a
node from a stranger may fail at any step, or step for ever.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, deque
from types import FunctionType, MethodDescriptorType
from typing import TYPE_CHECKING, Any

import msgspec

from kvd.core.node import NodeState
from kvd.core.replay import graph
from kvd.errors import Code

if TYPE_CHECKING:
    from collections.abc import Callable

    Read = Callable[[list[Any]], Any]

_DECODER = msgspec.msgpack.Decoder(graph.Frozen)


class NotFrozen(Exception):
    """These bytes are no frozen node, or not one of this version of kvd; the message says why."""


def thaw(data: bytes) -> NodeState:
    """The node that was frozen: it goes on exactly as that one would have.

    Raises:
        NotFrozen: it cannot be made.
    """
    try:
        frozen = _DECODER.decode(data)
        if frozen.format != graph.FORMAT:
            msg = f"its format is {frozen.format}, this kvd reads format {graph.FORMAT}"
            raise NotFrozen(msg)
        root = _Thawer(frozen).thaw()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        msg = f"{len(data)} bytes are no frozen node: {error}"
        raise NotFrozen(msg) from error
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        msg = f"the frozen node does not fit this kvd: {type(error).__name__}: {error}"
        raise NotFrozen(msg) from error
    if not isinstance(root, NodeState):
        msg = f"what was frozen is a {type(root).__name__}, not a node"
        raise NotFrozen(msg)
    return root


class _Thawer:
    """All objects first, empty; then what is in them, so that cycles need nothing special."""

    def __init__(self, frozen: graph.Frozen) -> None:
        self._rows = frozen.objects
        self._named = [graph.named(name) for name in frozen.names]
        self._shapes = [self._shape(number, names) for number, names in frozen.shapes]
        self._objects: list[Any] = []
        self._readers: dict[int, Read] = {
            graph.REFERENCE: lambda value: self._objects[_index(value[1])],
            graph.TUPLE: lambda value: tuple(self._values(value[1:])),
            graph.STRUCT: self._struct,
            graph.ENUM: self._enum,
            graph.NAME: lambda value: self._named[_index(value[1])],
            graph.METHOD: self._method,
            graph.LIST: lambda value: self._values(value[1:]),
            graph.DICT: lambda value: dict(self._pairs(value[1:])),
            graph.SET: lambda value: set(self._values(value[1:])),
            graph.FROZENSET: lambda value: frozenset(self._values(value[1:])),
        }

    def thaw(self) -> object:
        self._objects = [self._empty(row) for row in self._rows]
        for thing, row in zip(self._objects, self._rows, strict=True):
            self._fill(thing, row)
        return self._objects[0]

    # ---- objects -----------------------------------------------------------------------------

    def _shape(self, number: int, names: list[str]) -> tuple[type, list[str]]:
        """A class and its attributes, all of which it has room for and none of which is its own."""
        kind = self._named[_index(number)]
        if not isinstance(kind, type):
            raise TypeError(f"{kind!r} is no class")
        if issubclass(kind, msgspec.Struct):
            return kind, names
        if issubclass(kind, enum.Enum):
            raise TypeError(f"{kind.__name__} has members, not attributes")
        room = graph.attributes_of(kind)
        missing = sorted(set(room) - set(names))
        if missing and not graph.may_lack(kind):
            raise TypeError(f"{kind.__name__} has {', '.join(missing)}, the recorded one had not")
        for name in names:
            is_free = name in room if room else name not in dir(kind)
            if not is_free or name.startswith("__"):
                raise TypeError(f"{kind.__name__} has no attribute {name}")
        return kind, names

    def _empty(self, row: list[Any]) -> Any:
        match row:
            case [graph.INSTANCE, int(shape), *_]:
                kind: Any = self._shapes[_index(shape)][0]
                # A compiled class allows nobody but itself to make it empty.
                return kind.__new__(kind) if graph.may_lack(kind) else object.__new__(kind)
            case [graph.OBJECT_DICT, int(which), *_]:
                return graph.DICTS[_index(which)]()
            case [graph.OBJECT_LIST, *_]:
                return []
            case [graph.OBJECT_SET, *_]:
                return set()
            case [graph.OBJECT_DEQUE, None | int() as maxlen, *_]:
                return deque(maxlen=maxlen)
            case [graph.OBJECT_BUFFER, bytes()]:
                return bytearray()
            case _:
                raise ValueError("a row of no known kind")

    def _fill(self, one: Any, row: list[Any]) -> None:
        match one:
            case dict() | OrderedDict() | Counter():
                for key, value in self._pairs(row[2:]):
                    one[key] = value
            case list():
                one += self._values(row[1:])
            case bytearray():
                one += row[1]
            case set():
                one |= set(self._values(row[1:]))
            case deque():
                one.extend(self._values(row[2:]))
            case _:
                names = self._shapes[row[1]][1]
                for name, value in zip(names, row[2:], strict=True):
                    setattr(one, name, self._value(value))

    # ---- values ------------------------------------------------------------------------------

    def _value(self, value: Any) -> Any:
        return self._readers[value[0]](value) if type(value) is list else value

    def _values(self, values: list[Any]) -> list[Any]:
        return [self._value(value) for value in values]

    def _pairs(self, values: list[Any]) -> zip[tuple[Any, Any]]:
        held = self._values(values)
        return zip(held[::2], held[1::2], strict=True)

    def _struct(self, value: list[Any]) -> Any:
        kind, names = self._shapes[_index(value[1])]
        if not issubclass(kind, msgspec.Struct):
            raise TypeError(f"{kind.__name__} is no struct")
        return kind(**dict(zip(names, self._values(value[2:]), strict=True)))

    def _enum(self, value: list[Any]) -> Any:
        kind = self._named[_index(value[1])]
        if not issubclass(kind, enum.Enum):
            raise TypeError(f"{kind.__name__} is no enum")
        if kind is Code and value[2] not in kind.__members__:
            # What a peer of a later version said is not known here by name.
            return Code(value[2].lower().replace("_", "-"))
        return kind[value[2]]

    def _method(self, value: list[Any]) -> Any:
        owner, name = self._value(value[1]), value[2]
        kind = type(owner)
        if kind in graph.CONTAINERS:
            is_there = name in graph.CONTAINER_METHODS
        else:
            is_there = graph.name_of(kind) is not None and any(
                isinstance(vars(base).get(name), FunctionType | MethodDescriptorType)
                for base in kind.__mro__
            )
        if not is_there:
            raise AttributeError(f"{kind.__name__} has no method {name}")
        return getattr(owner, name)


def _index(number: Any) -> int:
    """A position in a list: below zero there is none."""
    if type(number) is not int or number < 0:
        raise IndexError(f"{number!r} is no position")
    return number
