"""Whether an event is about a thing: by the fields that name it."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from kvd.wire.events import Event

if TYPE_CHECKING:
    from collections.abc import Iterator

_FIELDS = {
    "lease": "lease",
    "room": "room",
    "session": "client",
    "peer": "peer",
    "locked_node": "node",
    "tree_node": "node",
}
"""Fields of events that name a thing, and how a reference calls its kind."""

_NAMED: dict[type, tuple[tuple[str, str], ...]] = {
    kind: tuple((name, _FIELDS[name]) for name in kind.__struct_fields__ if name in _FIELDS)
    for kind in get_args(Event)
}


def refs_of(event: Event) -> Iterator[str]:
    """What it names: ``lease:7``, ``room:12``."""
    for field, kind in _NAMED[type(event)]:
        name = getattr(event, field)
        if name:
            yield f"{kind}:{name}"


def is_about(event: Event, ref: str) -> bool:
    """Whether ``event`` names ``ref``; of a kind that no event names: never."""
    return ref in refs_of(event)
