"""A node as bytes: everything it knows, in one canonical form, and the hash of that.

Two nodes that took the same inputs have the same bytes: containers are written in their own order,
which is state (LRU, the free stack, the queue); sets are written sorted, attributes by name; and
what may be shared or not without anybody noticing, texts and messages, is written wherever it is.
What the forms are is said in ``graph``; ``thaw`` reads them.

It costs 5 to 10 us per node of the radix tree; a caller that has not so much time gives a limit.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable
from operator import attrgetter
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from kvd.core.replay import graph

if TYPE_CHECKING:
    from collections import Counter, OrderedDict
    from collections.abc import Iterable, Iterator

    from kvd.core.node import NodeState

Write = Callable[[Any], Any]
"""How a thing of one type becomes a value. Any: a graph holds things of every type."""

UNLIMITED = 2**62


class Unfreezable(Exception):
    """A node holds something whose state cannot be written down; the message says where."""


class TooManyObjects(Exception):
    """The graph is larger than the caller had time for; nothing came of it."""


def freeze(node: NodeState, *, max_objects: int = UNLIMITED) -> bytes:
    """Everything that ``node`` knows, between two steps.

    Raises:
        TooManyObjects: it has more than ``max_objects``; found out in time proportional to that.
        Unfreezable: a class of the core holds what no node may hold.
    """
    return msgspec.msgpack.encode(_Freezer(max_objects).freeze(node))


def state_hash(node: NodeState, *, max_objects: int = UNLIMITED) -> str:
    """SHA-256 of ``freeze(node)``, in hex: equal for nodes in equal states, in any process.

    Raises:
        TooManyObjects, Unfreezable: as ``freeze``.
    """
    return hashlib.sha256(freeze(node, max_objects=max_objects)).hexdigest()


class _Freezer:
    """One pass over a graph, breadth first, without recursion: trees are deep."""

    def __init__(self, max_objects: int) -> None:
        self._max_objects = max_objects
        self._constants = graph.constants()
        self._names: dict[str, int] = {}
        self._shapes: dict[tuple[type, tuple[str, ...]], int] = {}
        self._numbers: dict[int, int] = {}
        self._objects: list[Any] = []
        self._values: dict[type, Write] = {}
        """How a thing in an object is written, by its type; filled as types are met."""
        self._parts: dict[type, Write] = {}
        """The same for a thing in a frozen struct: its containers are part of the value."""
        self._rows: dict[type, Write] = {}

    def freeze(self, root: object) -> graph.Frozen:
        self._refer(root)
        rows = []
        # Grows while it is walked: an object is appended when it is first referred to.
        for thing in self._objects:
            kind = type(thing)
            write = self._rows.get(kind)
            if write is None:
                write = self._rows[kind] = self._row_writer(kind)
            rows.append(write(thing))
        shapes = [(self._name(kind), list(names)) for kind, names in self._shapes]
        return graph.Frozen(
            format=graph.FORMAT, names=list(self._names), shapes=shapes, objects=rows
        )

    # ---- objects -----------------------------------------------------------------------------

    def _row_writer(self, kind: type) -> Write:
        if kind in graph.CONTAINERS:
            return self._container_writer(kind)
        names = tuple(graph.attributes_of(kind))
        if len(names) < 2:
            return self._attributes
        get, value, plain = attrgetter(*names), self._value, graph.PLAIN

        def slotted(one: Any) -> list[Any]:
            try:
                held = get(one)
                row = [graph.INSTANCE, self._shape(kind, names)]
                row += [each if type(each) in plain else value(each) for each in held]
            except (AttributeError, Unfreezable):
                return self._attributes(one)
            return row

        return slotted

    def _container_writer(self, kind: type) -> Write:
        which, value = graph.CONTAINERS[kind], self._value
        if which == graph.OBJECT_DICT:
            one_of = graph.DICTS.index(kind)
            return lambda one: [which, one_of, *_pairs(one, value)]
        if which == graph.OBJECT_SET:
            return lambda one: [which, *map(value, _in_order(one))]
        if which == graph.OBJECT_DEQUE:
            return lambda one: [which, one.maxlen, *map(value, one)]
        if which == graph.OBJECT_BUFFER:
            return lambda one: [which, bytes(one)]
        return lambda one: [which, *map(value, one)]

    def _attributes(self, one: Any) -> list[Any]:
        """The slow way, which also knows the name of the attribute that cannot be written."""
        kind = type(one)
        names = tuple(graph.attributes_of(kind) or sorted(vars(one)))
        if graph.may_lack(kind):
            names = tuple(name for name in names if _is_set(one, name))
        row = [graph.INSTANCE, self._shape(kind, names)]
        for name in names:
            try:
                row.append(self._value(getattr(one, name)))
            except (AttributeError, Unfreezable) as error:
                msg = f"{kind.__name__}.{name}: {error}"
                raise Unfreezable(msg) from None
        return row

    def _shape(self, kind: type, names: tuple[str, ...]) -> int:
        self._name(kind)
        return self._shapes.setdefault((kind, names), len(self._shapes))

    def _refer(self, one: object) -> list[Any]:
        number = self._numbers.get(id(one))
        if number is None:
            number = self._numbers[id(one)] = len(self._objects)
            if number >= self._max_objects:
                msg = f"more than {self._max_objects} objects"
                raise TooManyObjects(msg)
            self._objects.append(one)
        return [graph.REFERENCE, number]

    # ---- values ------------------------------------------------------------------------------

    def _value(self, one: object) -> Any:
        kind = type(one)
        if kind in graph.PLAIN:
            return one
        write = self._values.get(kind)
        if write is None:
            write = self._values[kind] = self._writer(kind, self._value)
        return write(one)

    def _part(self, one: object) -> Any:
        kind = type(one)
        if kind in graph.PLAIN:
            return one
        write = self._parts.get(kind)
        if write is None:
            write = self._inline_writer(kind) or self._writer(kind, self._part)
            self._parts[kind] = write
        return write(one)

    def _writer(self, kind: type, within: Write) -> Write:
        """How values of a type are written, ``within`` being how what they contain is."""
        write: Write | None = None
        if kind is tuple:
            write = lambda one: [graph.TUPLE, *map(within, one)]  # noqa: E731
        elif kind in graph.CONTAINERS:
            write = self._container
        elif kind is FunctionType or issubclass(kind, type):
            write = lambda one: [graph.NAME, self._name(one)]  # noqa: E731
        elif kind is MethodType or kind is BuiltinMethodType:
            write = self._method
        elif kind is frozenset:
            write = lambda one: [graph.FROZENSET, *map(within, _in_order(one))]  # noqa: E731
        elif graph.name_of(kind) is None:
            msg = (
                f"a {kind.__module__}.{kind.__qualname__} is no state of a node: keep numbers, "
                "texts, messages, classes of kvd.core, or dicts, lists, sets and deques of them"
            )
            raise Unfreezable(msg)
        elif issubclass(kind, enum.Enum):
            write = lambda one: [graph.ENUM, self._name(kind), one.name]  # noqa: E731
        elif issubclass(kind, msgspec.Struct) and kind.__struct_config__.frozen:
            write = self._struct_writer(kind)
        return write or self._refer

    def _inline_writer(self, kind: type) -> Write | None:
        """How a container in a message is written; None for what is none."""
        if kind is list:
            return lambda one: [graph.LIST, *map(self._part, one)]
        if kind is dict:
            return lambda one: [graph.DICT, *_pairs(one, self._part)]
        if kind is set:
            return lambda one: [graph.SET, *map(self._part, _in_order(one))]
        return None

    def _struct_writer(self, kind: type[msgspec.Struct]) -> Write:
        names = kind.__struct_fields__
        shape = self._shape(kind, names)

        def struct(one: Any) -> list[Any]:
            held = [self._part(getattr(one, name)) for name in names]
            return [graph.STRUCT, shape, *held]

        return struct

    def _container(self, one: object) -> list[Any]:
        constant = self._constants.get(id(one))
        if constant is not None:
            return [graph.NAME, self._names.setdefault(constant, len(self._names))]
        return self._refer(one)

    def _method(self, one: MethodType | BuiltinMethodType) -> list[Any]:
        # A compiled function of a module is of the same type as a method of a container.
        if isinstance(one.__self__, ModuleType):
            return [graph.NAME, self._name(one)]
        return [graph.METHOD, self._value(one.__self__), one.__name__]

    def _name(self, thing: Any) -> int:
        name = graph.name_of(thing)
        if name is None:
            msg = (
                f"{thing.__module__}.{thing.__qualname__} has no name of its own in kvd.core: "
                "a lambda or a local function cannot be kept, a method can"
            )
            raise Unfreezable(msg)
        return self._names.setdefault(name, len(self._names))


def _is_set(one: object, name: str) -> bool:
    """Whether the instance has it: one of a compiled class may not."""
    try:
        getattr(one, name)
    except AttributeError:
        return False
    return True


def _pairs(
    one: dict[Any, Any] | OrderedDict[Any, Any] | Counter[Any], write: Write
) -> Iterator[Any]:
    """Keys and values by turns, in the order of the dict."""
    for key, value in one.items():
        yield write(key)
        yield write(value)


def _in_order(one: Iterable[Any]) -> list[Any]:
    """The members of a set, sorted: their own order differs from process to process."""
    try:
        return sorted(one)
    except TypeError:
        msg = "a set whose members have no order: its iteration is not repeatable, use a dict"
        raise Unfreezable(msg) from None
