"""Events as an operator reads them: how grave, in what words, and what they are about. Pure.

Words are made from templates by kind, so that a new field of an event is one word here. Whatever
names others chose is in them: all that leaves this module went through ``kvd.text.clean``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, get_args

from kvd.filters import row_passes
from kvd.text import clean, compact_bytes, duration
from kvd.wire.console import Column, TableRow
from kvd.wire.events import (
    DELIVERED,
    FAILED,
    WORK,
    Event,
    HandoffEnded,
    Moved,
    PagesCorrupt,
    refs_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvd.wire.console import Cell, Filter
    from tui.draw.spans import Style

Level = Literal["routine", "notice", "trouble", "fault"]

LETTERS: Mapping[Level, str] = {"routine": "·", "notice": "i", "trouble": "!", "fault": "X"}
STYLES: Mapping[Level, Style] = {
    "routine": "dim",
    "notice": "plain",
    "trouble": "warn",
    "fault": "bad",
}

ROUTINE = frozenset(str(kind.__struct_config__.tag) for kind in WORK)
"""What every request does."""
TROUBLE = frozenset(
    {
        *("quarantined", "peer-suspect", "peer-lost", "peer-refused", "handshake-failed"),
        *("message-refused", "recording-ended", "violation-healed"),
        *("drain-began", "peer-draining", "client-hung-up-on", "client-outlived", "slow-path"),
        *("tier-down", "tier-away", "cache-thrashing", "floor-broken"),
    }
)
FAULTS = frozenset({"violation", "pages-corrupt"})

KINDS: tuple[str, ...] = tuple(sorted(str(kind.__struct_config__.tag) for kind in get_args(Event)))
"""Every kind there is."""
CHANGES: tuple[str, ...] = (*(kind for kind in KINDS if kind not in ROUTINE), FAILED)
"""Kinds that are no work of requests, and what failed of that."""

_WORDS: dict[str, str] = {
    "client-attached": "client {session} {name}, pid {pid}",
    "client-gone": (
        "client {session} {name} hung up; given back[ {leases} leases][ {handoffs} handoffs]"
    ),
    "client-hung-up-on": (
        "hung up on client {session} {name}: {why}[; held until its processes end: {leases} leases]"
        "[ with {held_pages} pages][; {handoffs} handoffs given up]"
    ),
    "client-outlived": "client {session} {name} outlives pid {pid}: kept by pid {pids}",
    "client-returned": (
        "client {session} {name}, pid {pid}, is back"
        "[; {kept} leases of before the restart still used][; {ended} ended]"
    ),
    "adopted": (
        "generation {generation}: {pages} cached pages in {nodes} nodes"
        "[; {leases} leases of {sessions} clients with {held_pages} pages]"
        "[; {unproven_pages} pages not proven]"
    ),
    "lease-opened": (
        "lease {lease}[ of client {session}][ ({reason})][ room {room}][: {held_pages} pages held]"
        "[, prompt {prompt_tokens} tokens][, {prefix_tokens} cached]"
        "[, {missed_tokens} missed: {why_missed}]"
    ),
    "lease-extended": "lease {lease}: {held_pages} pages held",
    "lease-written": "lease {lease}: {written_tokens} tokens written",
    "engine-copied": (
        "lease {lease}: {way} of {pages} pages by rank {rank}[ {device}][ {n_bytes}][: {why}]"
    ),
    "lease-committed": (
        "lease {lease}: {cached_tokens} tokens cached[, {duplicate_pages} pages were there already]"
    ),
    "lease-released": (
        "lease {lease} released: {cause}[ ({reason})][, {freed_pages} pages freed][ after {age_s}]"
    ),
    "retracted": (
        "lease {lease} of client {session}: {freed_pages} pages freed[, {saved_bytes} saved]"
        "[ in {took_s}]"
    ),
    "resumed": (
        "lease {lease} of client {session} runs again[, {restored_bytes} restored]"
        "[, {spared_bytes} not needed][, away for {away_s}]"
    ),
    "quarantined": "lease {lease}: {pages} pages, {peer} may still write: {why}",
    "quarantine-ended": "lease {lease}: {pages} pages free after {age_s}: {proof}",
    "evicted": "{pages} pages[ of {component}][ in {nodes} nodes][: {reason}]",
    "cache-thrashing": (
        "client {hurt} missed {pages} pages that went[ from tier {tier}][ for client {session}]"
        "[ ({need})][ of {namespace}][, {after_s} later, and not for the first time]"
    ),
    "floor-broken": (
        "{taken_pages} pages of the floor of {namespace} went for client {session}[ ({need})]"
        "[; {left_pages} of {floor_pages} are left]"
    ),
    "pin-began": "pin {pin} of {owner}: {tokens} tokens[ for {ttl_s}]",
    "pin-left-pool": "pin {pin} of {owner}: {tokens} tokens, from now on in tier {tier}[: {why}]",
    "pin-ended": "pin {pin} of {owner}: {tokens} tokens[ after {age_s}][: {why}]",
    "waiting": (
        "client {session} waits for room[ in room {room}][: {needed_pages} pages needed]"
        "[, {headroom_pages} to be had]"
    ),
    "moved": "room {room} {side}[ {peer}][: {before}->{after} ({trigger})][: {why}]",
    "handoff-ended": (
        "room {room} {side}[ {peer}][: {outcome}][ {code}][ {reason}][, {moved_bytes} moved]"
        "[ in {took_s}][, {saved_bytes} not needed]"
    ),
    "pages-corrupt": (
        "room {room} from {peer}: {bad_pages} of {checked_pages} pages are not what was sent"
        "[ ({component})][: {why}]"
    ),
    "peer-up": "{peer} incarnation {incarnation}[ generation {generation}]",
    "peer-suspect": "{peer} silent for {silent_s}",
    "peer-lost": "{peer} silent for {silent_s}: its rooms are drained",
    "peer-replaced": "{peer} has restarted: {before} ended, {after} is here",
    "peer-refused": "{peer} {code}: {why}",
    "handshake-failed": "{peer} {address} {reason}: {why}[, {times} times]",
    "agent-changed": "{peer} generation {generation}: {state}[: {why}]",
    "slow-path": "{what}[ to {peer}][: {why}]",
    "pinned": "{pinned_bytes} of region {region}[ in {took_s}]",
    "transfer-started": "generation {generation}[: {why}]",
    "message-refused": "on {socket} from {sender}: {code}, {why}",
    "flushed": "{freed_pages} pages freed, {kept_pages} kept[ of namespace {namespace}]",
    "epoch": "namespace {namespace} is in epoch {epoch} by {who}",
    "tier-up": "tier {tier} serves, generation {generation}[, {objects} objects found]",
    "tier-down": "tier {tier} is down: {why}[, {cut} orders cut]",
    "tier-away": "tier {tier} is left alone for {for_s}: {why}",
    "tier-back": "tier {tier} serves again",
    "demoted": (
        "lease {lease}: {pages} pages written to tier {tier}[, {n_bytes} bytes][ in {took_s}]"
        "[, {lost} not written][: {why}]"
    ),
    "stop-demotion-began": (
        "{pages} cached pages: what tier {tier} has not of them is written[, for {for_s} at most]"
    ),
    "stop-demotion-ended": (
        "{pages} pages written to tier {tier} at the stop[ in {took_s}][, {left} left][: {why}]"
    ),
    "promoted": (
        "lease {lease}: {pages} pages read from tier {tier}[, {n_bytes} bytes][ in {took_s}]"
        "[, {bad} of no use][: {why}]"
    ),
    "violation": "{what}[; lease {lease}][; node {tree_node}][; {owner} {pid}]",
    "violation-healed": "{what}, after {lasted_s}",
    "recording-started": "every input from here on",
    "recording-ended": "{why}",
    "recording-saved": "{path}[: {why}]",
    "drain-began": (
        "nothing new is begun, asked for by {who}[: {why}][; {receives} receives][; {sends} sends]"
        "[; {refused} refused][; at most {deadline_s}]"
    ),
    "drained": "nothing is under way any more, after {lasted_s}[; {cut} given up]",
    "drain-ended": "new requests are taken again, after {lasted_s}",
    "peer-draining": "{peer} is {state}[: {why}][; {refused} receives refused]",
    "config-reloaded": "changed: {changed}[; needs a restart: {needs_restart}]",
    "config-refused": "{errors}",
}
"""By kind; what is in brackets is left out where one of its fields has nothing in it."""

_PARTS = {
    kind: [(part, re.findall(r"{(\w+)}", part)) for part in re.split(r"[][]", template)]
    for kind, template in _WORDS.items()
}
"""By kind; every other part is one that was in brackets."""

SIDES = {"decode": "receive", "prefill": "send"}


def tag_of(event: Event) -> str:
    """Its kind."""
    return str(event.__struct_config__.tag)


def level_of(event: Event) -> Level:
    """How grave it is."""
    if isinstance(event, HandoffEnded):
        return "notice" if event.outcome in DELIVERED else "trouble"
    return levels_of(tag_of(event))[0]


def levels_of(tag: str) -> tuple[Level, ...]:
    """How grave events of a kind may be."""
    if tag == "handoff-ended":
        return ("notice", "trouble")
    if tag in FAULTS:
        return ("fault",)
    if tag in TROUBLE:
        return ("trouble",)
    return ("routine",) if tag in ROUTINE else ("notice",)


def words(event: Event) -> str:
    """What happened, on one line."""
    made = ""
    for at, (part, names) in enumerate(_PARTS.get(tag_of(event), ())):
        found = {name: getattr(event, name) for name in names}
        if at % 2 == 0 or all(found.values()):
            made += part.format_map({name: shown(name, value) for name, value in found.items()})
    return clean(made)


def shown(name: str, value: object) -> str:
    """The value of a field, with the unit that its name says."""
    match value:
        case tuple():
            return ", ".join(str(item) for item in value)
        case int() | float() if name.endswith("_bytes"):
            return compact_bytes(value)
        case float() if name.endswith("_s"):
            return duration(value)
        case _:
            return str(value)


def links_of(event: Event) -> tuple[str, ...]:
    """All that it names: those of ``refs_of``, its part of a handoff, its pages."""
    found = tuple(dict.fromkeys(refs_of(event)))
    match event:
        case Moved(side=side, part=part) | HandoffEnded(side=side, part=part) if side in SIDES:
            return (f"{SIDES[side]}:{part}", *found)
        case PagesCorrupt(part=part, component=component, pages=pages):
            head = f"page:{component}:" if component else "page:"
            return (f"receive:{part}", *found, *[f"{head}{page}" for page in pages])
        case _:
            return found


# ---- as rows -------------------------------------------------------------------------------------

COLUMNS = (
    Column("kind", "text"),
    Column("level", "state"),
    Column("words", "text"),
    Column("about", "text"),
    Column("at", "since"),
)
"""What events are filtered by."""

_UNITS = {"_bytes": "bytes", "_tokens": "tokens", "_pages": "pages", "_s": "seconds"}


def row_of(event: Event) -> TableRow:
    """An event as a row of ``COLUMNS``."""
    about = " ".join(links_of(event))
    return TableRow(
        key_of(event), (tag_of(event), level_of(event), words(event), about, event.at_s)
    )


def key_of(event: Event) -> str:
    """What it is opened by."""
    return f"event:{event.seq}"


def record_of(event: Event) -> tuple[TableRow, tuple[Column, ...]]:
    """Every field of an event, and what it names, as a row with columns of its own."""
    made: list[tuple[str, str, Cell]] = [
        ("what", "text", words(event)),
        ("kind", "text", tag_of(event)),
        ("level", "text", level_of(event)),
        ("number", "count", event.seq),
        ("ago", "since", event.at_s),
        ("daemon's clock", "text", f"{event.at_s:.6f} s"),
    ]
    made += [(ref.partition(":")[0], "ref", ref) for ref in links_of(event)]
    for name in event.__struct_fields__[2:]:
        value = getattr(event, name)
        if isinstance(value, tuple):
            made.append((name, "text", shown(name, value)))
        else:
            kind = next((kind for end, kind in _UNITS.items() if name.endswith(end)), "text")
            made.append((name, kind if isinstance(value, int | float) else "text", value))
    columns = tuple(Column(name, kind) for name, kind, _ in made)
    return TableRow(key_of(event), tuple(cell for _, _, cell in made)), columns


def kinds_for(filters: Iterable[Filter]) -> tuple[str, ...]:
    """The kinds whose events may pass, to ask only for these; none where all may."""
    own = [condition for condition in filters if condition.column in {"kind", "level"}]
    found = tuple(kind for kind in KINDS if all(_may_pass(kind, condition) for condition in own))
    return () if len(found) == len(KINDS) else found or ("none",)


def _may_pass(kind: str, condition: Filter) -> bool:
    rows = [TableRow("", (kind, level, "", "", 0.0)) for level in levels_of(kind)]
    return any(row_passes(condition, row, COLUMNS, 0.0) for row in rows)
