"""Where consoles are served: what they watch goes in, frames come out, at a bounded cost.

Theory of operation. For each distinct query there is a feed, whoever asks; it is looked at again
when it is asked for and older than ``FRESH_S``, so any number of consoles with the same screen cost
one look. Looks are made in steps, of all feeds in turn, so a large table is no reason for a small
one to wait. Steps are paid from a credit that earns ``budget`` of the time that passes: without
credit, feeds are answered as they were, and say how old they are. So what looks cost the loop is
bounded by the budget, at once by ``MAX_CREDIT_S`` and a step, whatever is asked and however large
the node is. A feed that nobody asks for is forgotten.

What must not live here: what a table says (the views), who asks (``daemon.admins``).

Revisions come from one counter of the daemon, so a console that says what it has need not be
known: what is older than a feed, or from another one, is answered with the whole window.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import msgspec

from kvd import __version__
from kvd.console.concerns import AUDIT, CONCERNS, Worry, worry
from kvd.console.page_map import MapFeed
from kvd.console.survey import Surveyor
from kvd.console.tables import (
    CLIENTS,
    EVICTED,
    LEASES,
    PEERS,
    POOLS,
    ROOMS,
    TIERS,
    WAITING_REQUESTS,
)
from kvd.console.tree import EVICTION, LOCKED, ORPHANS, TREE
from kvd.console.view import NoWindow
from kvd.core.inspect.snapshot import totals
from kvd.core.inspect.words import node_word
from kvd.core.peers.peer import Life
from kvd.wire.admin import Frame
from kvd.wire.console import Latency, MapQuery, Query, Table, TableRow, Vitals
from kvd.wire.events import Event, is_of, refs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvd.console.context import Context
    from kvd.console.view import View
    from kvd.wire.admin import Look
    from kvd.wire.console import EventQuery


FRESH_S = 0.08
"""A look this young is good enough for anybody: a console paints ten times a second."""
WORRY_S = 0.5
"""How often concerns are counted, and latencies sorted, for the head of the frames."""
LEFT_S = 1.0
"""A look goes on for so long after the last question."""
FORGET_S = 10.0
MAX_FEEDS = 256
MAX_CREDIT_S = 0.005
"""The longest that the loop is busy with looks at once, but for the step that exceeds it."""
SLICE_S = 0.001
"""One feed's turn ends with the step that takes it over this."""
SURVEY_SHARE = 0.5
"""Of the budget, for looks at all pages: a large pool must leave something to the tables."""
SHARE_OVER_S = 2.0
"""What consoles cost is told as a mean over so long."""

_ENCODE = msgspec.msgpack.Encoder().encode


class Watch:
    """Plain record; the server writes what the console has, the shell when it is due."""

    __slots__ = ("after", "asked", "due_s", "have", "left", "queries")

    def __init__(self, asked: Look, now_s: float) -> None:
        self.asked = asked
        self.queries = tuple([msgspec.structs.replace(query, have=0) for query in asked.queries])
        """What is asked, whoever asks it."""
        self.have = [query.have for query in asked.queries]
        """The revision of each answer that it was sent last."""
        self.after = asked.events.after if asked.events is not None else 0
        self.left = asked.frames
        self.due_s = now_s

    @property
    def is_answered(self) -> bool:
        """Whether its first frame was sent."""
        return self.left < self.asked.frames

    def sent(self, now_s: float) -> None:
        """One frame less; the next one is due in its turn, or later if this one came late."""
        self.left -= 1
        self.due_s = max(self.due_s + self.asked.every_s, now_s)


def is_about(event: Event, ref: str) -> bool:
    """Whether ``event`` names ``ref``; of a kind that no event names: never."""
    return ref in refs_of(event)


def vitals(context: Context, worry: Worry, latency: Latency, console_share: float) -> Vitals:
    """One walk over the open parts and the peers; everything else is counted already."""
    node = context.node
    decoder, prefiller = node.decoder, node.prefiller
    return Vitals(
        at_s=context.now_s,
        node=node.settings.name,
        incarnation=node.settings.incarnation,
        version=__version__,
        state=node_word(node),
        transport=node.transport,
        generation=node.peers.generation,
        started_s=node.started_s,
        lag_s=context.lag_s,
        clients=len(node.sessions.by_id),
        leases=len(node.leases.leases),
        rooms=len(decoder.open.parts) + len(prefiller.rooms.by_room),
        waiting=len(node.admission),
        peers=len({*node.peers.by_name, *(peer.name for peer in node.peers.dialed.values())}),
        peers_up=sum(peer.life is Life.UP for peer in node.peers.by_name.values()),
        findings=worry.count,
        worst=worry.worst,
        last_event=node.out.seq,
        totals=totals(node),
        sources=context.recent.sources(),
        latency=latency,
        moving_bytes_in=sum(part.moved_bytes for part in decoder.open.parts.values()),
        moving_bytes_out=sum(part.moved_bytes for part in prefiller.rooms.live()),
        console_share=console_share,
    )


MAX_ANSWERS = 16
"""Encoded answers that are kept until the next look: consoles have the last revisions, or none."""


class Feed:
    """What a query was last answered with. ``look`` now and then, ``answer`` anybody."""

    def __init__(self, view: View[Any], query: Query, revisions: Iterator[int]) -> None:
        self.asked_s = self.at_s = float("-inf")
        """``at_s``: when the last look was over."""
        self._view = view
        self._query = query
        self._revisions = revisions
        self._born = self._revision = next(revisions)
        self._order: tuple[str, ...] = ()
        self._order_changed = self._born
        self._rows: dict[str, tuple[TableRow, int]] = {}
        self._total = self._of = 0
        self._trouble = "not looked at yet: the daemon spends only so much on consoles"
        self._answers: dict[int, bytes] = {}

    @property
    def revision(self) -> int:
        """Of what ``answer`` says; 0 where it says why there is nothing."""
        return 0 if self._trouble else self._revision

    def look(self, context: Context) -> Iterator[None]:
        """The window as it is now, a step at a time: answered when it is over."""
        window = yield from self._view.look(context, self._query)
        self.at_s = context.now_s
        self._answers.clear()
        if isinstance(window, NoWindow):
            self._trouble = window.why
            return
        self._trouble = ""
        self._total, self._of = window.total, window.of
        before = self._rows
        revision = 0
        rows: dict[str, tuple[TableRow, int]] = {}
        for row in window.rows:
            known = before.get(row.key)
            if known is None or known[0] != row:
                revision = revision or next(self._revisions)
                known = (row, revision)
            rows[row.key] = known
        order = tuple(rows)
        if order != self._order:
            revision = revision or next(self._revisions)
            self._order, self._order_changed = order, revision
        self._rows = rows
        self._revision = revision or self._revision

    def answer(self, have: int) -> bytes:
        """What a console with that revision lacks: a ``Table``, encoded once for all who ask."""
        since = have if self._born <= have <= self._revision else 0
        found = self._answers.get(since)
        if found is None:
            if len(self._answers) >= MAX_ANSWERS:
                self._answers.clear()
            found = self._answers[since] = _ENCODE(self._table(since))
        return found

    def _table(self, since: int) -> Table:
        """All of it if ``since`` is 0."""
        return Table(
            view=self._view.name,
            revision=self.revision,
            since=since,
            at_s=self.at_s,
            total=self._total,
            of=self._of,
            columns=() if since else self._view.columns,
            order=None if self._order_changed <= since else self._order,
            rows=tuple([row for row, changed in self._rows.values() if changed > since]),
            trouble=self._trouble,
        )


HELD = (POOLS, LEASES, ROOMS, PEERS, CLIENTS, WAITING_REQUESTS, TIERS, EVICTED)
CACHED = (TREE, LOCKED, ORPHANS, EVICTION)

# Any, because each view has objects of its own kind.
VIEWS: dict[str, View[Any]] = {view.name: view for view in (CONCERNS, AUDIT, *HELD, *CACHED)}


class ConsoleServer:
    """Serves every console of a node. ``events`` is ``Bus.after``."""

    def __init__(
        self,
        context: Context,
        events: Callable[[int], tuple[int, Sequence[Event]]],
        budget: float,
        timer: Callable[[], float] = time.thread_time,
    ) -> None:
        self.lag_s = 0.0
        """How late the loop's timer was, at worst lately; the shell writes it."""
        self._scene = context
        context.surveyor = Surveyor(context.node, budget * SURVEY_SHARE, timer)
        self._events = events
        self._budget = budget
        self._timer = timer
        self._credit_s = MAX_CREDIT_S
        self._last_s = float("-inf")
        self._revisions = itertools.count(1)
        self._begun_s = 0.0
        """From here on time is not paid for yet."""
        self._feeds: dict[Query | MapQuery, Feed | MapFeed] = {}
        self._looks: dict[Feed | MapFeed, Iterator[None]] = {}
        """Under way; the next turn is that of the first."""
        self._vitals: Vitals | None = None
        self._worry, self._worry_s = Worry(), float("-inf")
        self._latency = Latency()
        self._spent_s, self._share, self._share_s = 0.0, 0.0, float("-inf")

    def set_budget(self, budget: float) -> None:
        """Earn so much of a core from now on."""
        self._budget = budget
        self._scene.surveyor.share = budget * SURVEY_SHARE

    def frame(self, watch: Watch, now_s: float) -> bytes:
        """The next frame of one console, at ``now_s`` on the daemon's clock."""
        self._begin(now_s)
        feeds = [self._asked_for(query, now_s) for query in watch.queries]
        self._look_on(now_s)
        have, answers = watch.have, []
        for place, feed in enumerate(feeds):
            if feed is None:
                query = watch.asked.queries[place]
                answer, have[place] = _no_table(query, now_s), 0
            else:
                answer, have[place] = feed.answer(have[place]), feed.revision
            answers.append(msgspec.Raw(answer))
        head = self._head(now_s)
        lost, skipped, since_s, events = self._happened(watch.asked.events, watch.after)
        watch.after = upto = self._scene.node.out.seq
        frame = _ENCODE(
            Frame(
                call=watch.asked.call,
                vitals=head,
                answers=tuple(answers),
                events=events,
                lost=lost,
                skipped=skipped,
                upto=upto,
                since_s=since_s,
            )
        )
        self._pay()
        return frame

    def turn(self, now_s: float) -> None:
        """A beat of the loop: while somebody looks, a little of what is looked at."""
        self._begin(now_s)
        if self._may_look():
            self._scene.surveyor.turn(now_s)
            self._pay()
            self._look_on(now_s)

    # ---- the budget --------------------------------------------------------------------------

    def _begin(self, now_s: float) -> None:
        """Time is paid for from here on."""
        self._begun_s = self._timer()
        self._scene.now_s, self._scene.lag_s = now_s, self.lag_s
        self._earn(now_s)

    def _earn(self, now_s: float) -> None:
        if self._last_s > float("-inf"):
            earned_s = (now_s - self._last_s) * self._budget
            self._credit_s = min(self._credit_s + earned_s, MAX_CREDIT_S)
        self._last_s = now_s
        if now_s - self._share_s >= SHARE_OVER_S:
            over_s = now_s - self._share_s
            self._share = self._spent_s / over_s if over_s < float("inf") else 0.0
            self._spent_s, self._share_s = 0.0, now_s
            self._forget(now_s)

    def _pay(self) -> None:
        """For the time since the last pay."""
        begun_s, self._begun_s = self._begun_s, self._timer()
        self._credit_s -= self._begun_s - begun_s
        self._spent_s += self._begun_s - begun_s

    def _may_look(self) -> bool:
        return self._credit_s > 0.0

    # ---- feeds -------------------------------------------------------------------------------

    def _asked_for(self, query: Query | MapQuery, now_s: float) -> Feed | MapFeed | None:
        """What it is answered from, which is looked at again if it is old; None: no such table."""
        feed = self._feeds.get(query)
        if feed is None:
            if isinstance(query, Query) and query.view not in VIEWS:
                return None
            if len(self._feeds) >= MAX_FEEDS:
                self._drop(min(self._feeds, key=lambda query: self._feeds[query].asked_s))
            feed = self._feeds[query] = self._new_feed(query)
        feed.asked_s = now_s
        if now_s - feed.at_s >= FRESH_S and feed not in self._looks:
            self._looks[feed] = feed.look(self._scene)
        return feed

    def _new_feed(self, query: Query | MapQuery) -> Feed | MapFeed:
        if isinstance(query, MapQuery):
            return MapFeed(query, self._revisions)
        return Feed(VIEWS[query.view], query, self._revisions)

    def _look_on(self, now_s: float) -> None:
        """Steps of what is under way, each feed in its turn, while there is credit."""
        looks, timer = self._looks, self._timer
        while looks and self._may_look():
            feed = next(iter(looks))
            steps = looks.pop(feed)  # first, so that a bug in it costs this feed this look only
            if now_s - feed.asked_s > LEFT_S:
                continue
            until_s = self._begun_s + SLICE_S
            is_over = next(steps, self) is self
            while not is_over and timer() < until_s:
                is_over = next(steps, self) is self
            if not is_over:
                looks[feed] = steps
            self._pay()

    def _forget(self, now_s: float) -> None:
        for query in [key for key, feed in self._feeds.items() if now_s - feed.asked_s > FORGET_S]:
            self._drop(query)

    def _drop(self, query: Query | MapQuery) -> None:
        self._looks.pop(self._feeds.pop(query), None)

    # ---- the head, and events ----------------------------------------------------------------

    def _head(self, now_s: float) -> Vitals:
        if now_s - self._worry_s >= WORRY_S and self._may_look():
            self._worry, self._worry_s = worry(self._scene), now_s
            self._latency = self._scene.recent.latency(now_s)
        if self._vitals is None or now_s - self._vitals.at_s >= FRESH_S:
            self._vitals = vitals(self._scene, self._worry, self._latency, self._share)
        return self._vitals

    def _happened(
        self, asked: EventQuery | None, after: int
    ) -> tuple[int, int, float, tuple[Event, ...]]:
        """How many were lost, how many did not fit, since when all are here; and the newest."""
        if asked is None:
            return 0, 0, 0.0, ()
        lost, events = self._events(after)
        since_s = events[0].at_s if lost else 0.0
        if lost:
            kept = self._scene.recent.between(after, events[0].seq)
            lost, events = lost - len(kept), (*kept, *events)
        if asked.kinds:
            kinds = set(asked.kinds)
            events = [event for event in events if is_of(event, kinds)]
        if asked.about:
            events = [event for event in events if is_about(event, asked.about)]
        skipped = max(0, len(events) - asked.limit)
        return lost, skipped, since_s, tuple(events[skipped:])


def _no_table(query: Query | MapQuery, now_s: float) -> bytes:
    name = query.view if isinstance(query, Query) else ""
    known = ", ".join(VIEWS)
    why = f"there is no table {name!r}: this daemon has {known}"
    return _ENCODE(Table(view=name, revision=0, since=0, at_s=now_s, total=0, of=0, trouble=why))
