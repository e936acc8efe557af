"""What the object graph of a node is made of, and how each kind of thing is written down.

A graph is written as objects and values. An *object* has an identity that counts: an instance of a
class of the core, a dict, list, set or deque, a buffer. It is written once and referred to by its
number. A *value* has none: numbers and texts, tuples, enums, frozen structs with all they contain.
A container inside a frozen struct is part of that value, because messages are never written to.

Objects are rows ``[kind, ...]``, values are msgpack's own or lists ``[tag, ...]``. Names stand for
what the program itself provides: classes, functions of a module, containers that are constants.
Only names of ``kvd.core``, ``kvd.wire``, ``kvd.types`` and ``kvd.errors`` exist here.

A node has the same bytes whether its classes are compiled or not. A class that a node keeps allows
interpreted subclasses, in mypyc's words: only then can an instance of a compiled one be made empty.

``freeze`` writes, ``thaw`` reads.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections import Counter, OrderedDict, deque
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final

import msgspec

import kvd.core
import kvd.errors
import kvd.types
import kvd.wire

FORMAT: Final = 2
"""Grows when rows or values are written in another way."""

PACKAGES: Final = (kvd.core, kvd.wire)
MODULES: Final = (kvd.types, kvd.errors)
"""Where the classes are that a node may be made of."""

REFERENCE, TUPLE, STRUCT, ENUM, NAME, METHOD, LIST, DICT, SET, FROZENSET = range(10)
"""Tags of values."""

INSTANCE, OBJECT_DICT, OBJECT_LIST, OBJECT_SET, OBJECT_DEQUE, OBJECT_BUFFER = range(6)
"""Kinds of objects."""

DICTS: Final[tuple[type, ...]] = (dict, OrderedDict, Counter)
"""The second field of an ``OBJECT_DICT`` says which of them it is."""

CONTAINERS: Final[dict[type, int]] = {
    dict: OBJECT_DICT,
    OrderedDict: OBJECT_DICT,
    Counter: OBJECT_DICT,
    list: OBJECT_LIST,
    set: OBJECT_SET,
    deque: OBJECT_DEQUE,
    bytearray: OBJECT_BUFFER,
}

PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes})
"""Values that msgpack writes as they are."""

CONTAINER_METHODS: Final = frozenset({"append", "move_to_end", "pop", "popleft", "setdefault"})
"""Methods of containers that may be kept in an attribute, for speed."""


_COMPILED: Final = "__mypyc_attrs__"
"""What a class has that mypyc has compiled: the names of its attributes."""

FUNCTIONS: Final = (FunctionType, BuiltinFunctionType)
"""Functions of a module, interpreted and compiled."""


class Frozen(msgspec.Struct, frozen=True, array_like=True):
    """A graph: its first object is the node. ``shapes`` are a class's name and its attributes."""

    format: int
    names: list[str]
    shapes: list[tuple[int, list[str]]]
    objects: list[list[Any]]
    """Any: rows are what the tags say, and ``thaw`` checks each as it reads it."""


@functools.cache
def modules() -> dict[str, ModuleType]:
    """All modules of ours, loaded: a name means the same in every process."""
    found = {module.__name__: module for module in MODULES}
    for package in PACKAGES:
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            found[info.name] = importlib.import_module(info.name)
    return dict(sorted(found.items()))


@functools.cache
def kinds() -> dict[str, object]:
    """What a node may be made of, by its name alone: classes, functions, constant containers.

    A name that two modules give to two things stands for neither, so that a recording does not
    notice in which module a thing lives.
    """
    found: dict[str, object] = {}
    ambiguous = set()
    for module in modules().values():
        for name, thing in vars(module).items():
            is_constant = type(thing) in CONTAINERS and name.isupper()
            is_own = isinstance(thing, (type, *FUNCTIONS)) and thing.__module__ == module.__name__
            if (is_constant or is_own) and found.setdefault(name, thing) is not thing:
                ambiguous.add(name)
    return {name: thing for name, thing in found.items() if name not in ambiguous}


def name_of(thing: type | FunctionType) -> str | None:
    """The kind of a class or function of ours; None if it has no name to be found by."""
    name = thing.__qualname__
    return name if kinds().get(name) is thing else None


def constants() -> dict[int, str]:
    """The containers that modules of ours hold for good, by identity: ``NO_CHILDREN`` for one."""
    return {id(thing): name for name, thing in kinds().items() if type(thing) in CONTAINERS}


def named(name: str) -> Any:
    """The class, function or constant of that name; no module is loaded for it.

    Any: what a name stands for differs, and the caller checks which kind it needs.

    Raises:
        KeyError: there is none, or none that may be in a node.
    """
    thing: Any = kinds()[name]
    if isinstance(thing, type) and issubclass(thing, BaseException):
        raise KeyError(name)
    return thing


def attributes_of(kind: type) -> list[str]:
    """The attributes that the class has room for, sorted; none: its instances have a dict.

    An interpreted class declares them with ``__slots__``, and sets them all; a compiled one lists
    those of any instance (``may_lack``).
    """
    found: set[str] = set()
    for base in kind.__mro__:
        own = vars(base).get(_COMPILED, vars(base).get("__slots__", ()))
        found.update((own,) if isinstance(own, str) else own)
    return sorted(found)


def may_lack(kind: type) -> bool:
    """Whether an instance has not always all that its class has room for: it is compiled."""
    return _COMPILED in vars(kind)
