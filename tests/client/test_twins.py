"""The blocking client is the asynchronous one, verb by verb: nothing is missing or differs.

``kvd/client/sync.py`` is written by hand, see ``docs/contributing.md``. What a reader would have to
keep equal is compared here: the verbs, their parameters with kinds, defaults and types, and of
which verb each says that it is the twin.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import kvd.client
from kvd.client import (
    Lease,
    Node,
    PageArena,
    PendingCall,
    Receive,
    Send,
    SyncArena,
    SyncArenaReceive,
    SyncLease,
    SyncNode,
    SyncReceive,
    SyncSend,
)

TWINS = [
    (Node, SyncNode),
    (Lease, SyncLease),
    (Receive, SyncReceive),
    (Receive, SyncArenaReceive),
    (Send, SyncSend),
    (PageArena, SyncArena),
]

NOT_THERE = {
    (Lease, "record"),  # what the verbs of ``Node`` read of a lease
    (Lease, "is_of"),
    (Receive, "is_ended"),  # ``poll`` says it, and reads what has come
    (Node, "close"),  # nothing of it could be waited for: a plain method
    (Node, "events"),  # an iterator of its own, which has ``poll``
}
"""Of the asynchronous side alone."""

OWN: dict[type, set[str]] = {
    SyncNode: {"pump", "fileno", "close", "events", "gather", "send_gathered"},
    SyncReceive: {"poll"},
    SyncArenaReceive: {"poll"},
}
"""Of the blocking side alone."""

OTHER_TYPES = {"Lease": "SyncLease", "Send": "SyncSend", "Receive": "SyncReceive"}
"""Handles are given and returned as those of their own side."""

OTHER_PARAMETERS = {"connect_sync": {"on_unreachable"}}

PAIRS = pytest.mark.parametrize(("own", "sync"), TWINS, ids=[twin.__name__ for _, twin in TWINS])


def public(cls: type) -> dict[str, Any]:
    return {
        name: inspect.getattr_static(cls, name) for name in dir(cls) if not name.startswith("_")
    }


def parameters(verb: Any, *, is_sync: bool) -> list[tuple[str, Any, Any, str]]:
    """Names, kinds, defaults and types, with types of the blocking side by their twins' names."""
    found = []
    for one in inspect.signature(verb).parameters.values():
        told = str(one.annotation)
        if not is_sync:
            told = OTHER_TYPES.get(told, told)
        found.append((one.name, one.kind, one.default, told))
    return found


def is_there(own: type, name: str, sync: type) -> bool:
    if any((base, name) in NOT_THERE for base in own.__mro__):
        return False
    return not (name == "lease" and sync is SyncArenaReceive)  # the engine's own pages


@PAIRS
def test_each_verb_has_its_twin_with_the_same_parameters(own: type, sync: type) -> None:
    theirs = public(sync)
    for name, what in public(own).items():
        if not is_there(own, name, sync):
            continue
        if isinstance(what, property):
            assert isinstance(theirs[name], property), name
        elif inspect.iscoroutinefunction(what):
            begin = theirs[f"begin_{name}"]
            assert parameters(begin, is_sync=True) == parameters(what, is_sync=False), name
            blocking = inspect.signature(theirs[name])
            assert blocking.parameters == inspect.signature(begin).parameters, name
        else:
            assert parameters(theirs[name], is_sync=True) == parameters(what, is_sync=False), name


@PAIRS
def test_no_twin_has_a_verb_of_nothing(own: type, sync: type) -> None:
    known = {name for name in public(own) if is_there(own, name, sync)}
    begun = {f"begin_{name}" for name in known if inspect.iscoroutinefunction(public(own)[name])}
    assert set(public(sync)) == known | begun | OWN.get(sync, set())


@PAIRS
def test_each_says_of_which_verb_it_is_the_twin(own: type, sync: type) -> None:
    for name, what in public(own).items():
        if not is_there(own, name, sync):
            continue
        place = f"``{own.__name__}.{name}``"
        twin = public(sync)[f"begin_{name}" if inspect.iscoroutinefunction(what) else name]
        said = (twin.fget if isinstance(twin, property) else twin).__doc__.partition("\n")[0]
        word = "Begin" if inspect.iscoroutinefunction(what) else "As"
        assert said.startswith(f"{word} {place}"), (name, said)


def test_what_a_verb_returns_is_what_its_twin_is_pending_for() -> None:
    """Where a verb returns nothing it is the handle that the verb was about."""
    for own, sync in TWINS:
        for name, what in public(own).items():
            if not is_there(own, name, sync) or not inspect.iscoroutinefunction(what):
                continue
            told = str(inspect.signature(what).return_annotation)
            pending = str(inspect.signature(public(sync)[f"begin_{name}"]).return_annotation)
            outcome = pending.removeprefix("PendingCall[").removesuffix("]")
            handles = {sync.__name__, "Self", "SyncLease"}
            if told == "None":
                assert outcome in handles, (sync, name)
            else:
                wanted = {told, f"Sync{told}", *(["SyncArena"] if told == "PageArena" else [])}
                if sync is SyncArena and told == "Receive":
                    wanted = {"SyncArenaReceive"}
                assert outcome in wanted, (sync, name, told, outcome)


def test_both_ways_in_take_the_same() -> None:
    ours = parameters(kvd.client.connect, is_sync=False)
    theirs = parameters(kvd.client.connect_sync, is_sync=True)
    more = OTHER_PARAMETERS["connect_sync"]
    assert [one for one in theirs if one[0] not in more] == ours
    assert {one[0] for one in theirs} - {one[0] for one in ours} == more


def test_a_verb_that_is_missing_would_be_found() -> None:
    """The comparison sees a verb, a default and a type that differ."""

    class Later(Lease):
        async def pin(self, pages: int = 1) -> None:
            """Pin."""

    with pytest.raises(KeyError, match="begin_pin"):
        test_each_verb_has_its_twin_with_the_same_parameters(Later, SyncLease)

    class Other(SyncLease):
        def begin_pin(self, pages: int = 2) -> PendingCall[SyncLease]:
            raise NotImplementedError

        pin = begin_pin

    with pytest.raises(AssertionError, match="pin"):
        test_each_verb_has_its_twin_with_the_same_parameters(Later, Other)
