"""What the console knows and says, without a terminal: no Textual here.

``Console.take`` folds news into the state; everything else reads it. All texts that come out are
safe to show (``clean``); none of them is markup.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, assert_never

import msgspec

from kvd.text import amount, bar, clean, duration, event_line, progress, room, share
from kvd.types import short
from kvd.wire.events import Event
from kvd.wire.snapshot import Snapshot

if TYPE_CHECKING:
    from kvd.wire.snapshot import LeaseState, PeerState, PoolState, RoomState

PAGES = ("overview", "leases", "rooms", "peers", "events")
MAX_ROWS = 200
"""Rows of a table: more would not be read, and repainting them twice a second costs."""
MAX_EVENTS = 500


class Seen(msgspec.Struct, frozen=True):
    """The daemon answered; ``events`` are new, ``lost`` of them could not be had."""

    snapshot: Snapshot
    events: tuple[Event, ...] = ()
    lost: int = 0


class Down(msgspec.Struct, frozen=True):
    """The daemon did not answer."""

    why: str


class Question(msgspec.Struct, frozen=True):
    """Ask why: ``kind`` is lease or room."""

    kind: str
    number: int


class Answered(msgspec.Struct, frozen=True):
    """What the daemon said to a question: the sentence first."""

    question: Question
    lines: tuple[str, ...]


News = Seen | Down | Answered


class Row(msgspec.Struct, frozen=True):
    """One row of a table; Enter on it asks ``question``, if there is one."""

    key: str
    cells: tuple[str, ...]
    question: Question | None = None


class Sheet(msgspec.Struct, frozen=True):
    """One table: at most ``MAX_ROWS`` rows; ``left_out`` says how many there are beyond."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    left_out: int


class Console:
    """Everything that is shown."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.snapshot: Snapshot | None = None
        self.trouble = "connecting"
        self.answer: Answered | None = None
        self.event_lines: deque[str] = deque(maxlen=MAX_EVENTS)

    def take(self, news: News) -> tuple[str, ...]:
        """Fold ``news`` in; returns the event lines it brought."""
        match news:
            case Seen(snapshot, events, lost):
                lines = self._restart_line(snapshot)
                lines += [f"-- {lost} events are lost"] if lost else []
                lines += [event_line(event) for event in events]
                self.snapshot, self.trouble = snapshot, ""
                self.event_lines.extend(lines)
                return tuple(lines)
            case Down(why):
                self.trouble = clean(why)
            case Answered():
                self.answer = news
            case _:
                assert_never(news)
        return ()

    def _restart_line(self, now: Snapshot) -> list[str]:
        before = self.snapshot
        if before is None or before.incarnation == now.incarnation:
            return []
        return [f"-- the daemon was restarted: incarnation {clean(short(now.incarnation))}"]

    def head(self) -> str:
        """One line: which daemon, how it is, and whether it still answers."""
        if self.trouble:
            return f"NOT REACHABLE {clean(self.endpoint)}: {self.trouble} - trying again"
        shot = self.snapshot
        assert shot is not None, "without trouble there was an answer"
        up = duration(shot.uptime_s)
        return f"{clean(shot.node)}  {clean(shot.state)}  kvd {clean(shot.version)}  up {up}"

    def answer_text(self) -> str:
        """The last answer, or nothing."""
        return "\n".join(clean(line) for line in self.answer.lines) if self.answer else ""

    def overview(self) -> str:
        """Pools, then what is under way, then the totals."""
        shot = self.snapshot
        if shot is None:
            return "no daemon has answered yet"
        totals = shot.totals
        return "\n".join(
            [
                *(line for pool in shot.pools for line in _pool_lines(pool)),
                "    (H held, C cached, Q quarantined, . free)",
                "",
                f"engines {len(shot.clients)}   leases {len(shot.leases)}   "
                f"rooms {len(shot.rooms)}   waiting for room {len(shot.waiting)}   "
                f"peers {len(shot.peers)}",
                f"handoffs: {totals.handoffs_delivered} delivered, {totals.handoffs_failed} failed",
                f"sent {amount(totals.sent_bytes)}, received {amount(totals.received_bytes)}, "
                f"saved {amount(totals.saved_bytes)}",
                f"invariants found broken: {totals.violations}, {shot.audit.findings} of them now",
            ]
        )

    def sheet(self, page: str) -> Sheet:
        """The table of ``page``: leases, rooms or peers."""
        shot = self.snapshot
        rows: tuple[Row, ...] = ()
        if shot is not None:
            rows = {
                "leases": tuple(map(_lease_row, shot.leases)),
                "rooms": tuple(map(_room_row, shot.rooms)),
                "peers": tuple(map(_peer_row, shot.peers)),
            }[page]
        return Sheet(COLUMNS[page], rows[:MAX_ROWS], max(0, len(rows) - MAX_ROWS))


COLUMNS = {
    "leases": ("lease", "owner", "reason", "room", "held", "quar", "age", "holders"),
    "rooms": ("room", "side", "state", "peer", "pages", "age", "ends in", "waits for"),
    "peers": ("peer", "state", "silent", "rtt ms", "in", "out", "address"),
}


def _pool_lines(one: PoolState) -> list[str]:
    """A pool: the bar, then the figures and whether they add up, then what is special to it."""
    counts = {
        "held": one.held_pages,
        "cached": one.cached_pages,
        "quarantined": one.quarantined_pages,
    }
    cells = bar(**counts, total=one.total_pages, width=48)
    found = 1 + one.free_pages + sum(counts.values())
    check = "adds up" if found == one.total_pages else f"DOES NOT ADD UP: {found}"
    figures = ", ".join(f"{count} {name}" for name, count in counts.items())
    return [
        f"{clean(one.pool)}/{clean(one.component)} [{cells}]",
        f"    {one.total_pages} pages: {one.free_pages} free, {figures}; {check}",
        *(f"    {line}" for line in _special_lines(one)),
    ]


def _special_lines(one: PoolState) -> list[str]:
    """Companions, the window against full allocation, and how the buffer fares."""
    lines = [f"with {clean(beside.component)} in lockstep" for beside in one.companions]
    if one.window is not None:
        mapped = share(one.window.mapped_pages, one.window.full_pages)
        lines.append(f"window of {one.window.window_tokens} tokens, mapped of all: {mapped}")
    if one.buffer is not None:
        wanted = one.buffer.hits + one.buffer.misses
        lines.append(f"found of wanted pages: {share(one.buffer.hits, wanted)}")
    return lines


def _lease_row(one: LeaseState) -> Row:
    return Row(
        key=str(one.id),
        cells=(
            f"{one.id} {clean(one.state)}",
            f"{clean(one.owner)}[{one.pid}]",
            clean(one.reason),
            room(one.room),
            "+".join(str(n) for n in (one.held_pages, *(has.held_pages for has in one.beside))),
            str(one.quarantined_pages),
            duration(one.age_s),
            clean(", ".join(one.holders)),
        ),
        question=Question("lease", one.id),
    )


def _room_row(one: RoomState) -> Row:
    return Row(
        key=f"{one.side} {one.part} {one.room}",
        cells=(
            str(one.room),
            clean(one.side),
            clean(one.state),
            clean(one.peer),
            progress(one),
            duration(one.age_s),
            duration(one.deadline_in_s),
            clean(one.waiting_for),
        ),
        question=Question("room", one.room),
    )


def _peer_row(one: PeerState) -> Row:
    return Row(
        key=f"{clean(one.name)} {clean(one.incarnation)}",
        cells=(
            clean(one.name),
            clean(one.state),
            duration(one.silent_s),
            f"{one.round_trip_ms:.2f}",
            str(one.open_receives),
            str(one.open_sends),
            clean(one.address),
        ),
    )
