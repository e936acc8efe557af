"""Where consoles are served: what they watch goes in, frames come out, at a bounded cost.

Theory of operation. For each distinct query there is a feed, whoever asks; it is looked at again
when it is asked for and older than ``FRESH_S``, so any number of consoles with the same screen cost
one look. Looks are made in steps, of all feeds in turn, so a large table is no reason for a small
one to wait. Steps are paid from a credit that earns ``budget`` of the time that passes: without
credit, feeds are answered as they were, and say how old they are. So what looks cost the loop is
bounded by the budget, at once by ``MAX_CREDIT_S`` and a step, whatever is asked and however large
the node is. A feed that nobody asks for is forgotten.

What must not live here: what a table says (the views), who asks (``daemon.admins``).
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

import msgspec

from kvd.console.about import is_about
from kvd.console.feed import Feed
from kvd.console.pagemap import MapFeed
from kvd.console.survey import Surveyor
from kvd.console.views import VIEWS, worry
from kvd.console.vitals import Loop, Worry, vitals
from kvd.wire.admin import Frame
from kvd.wire.console import Latency, MapQuery, Query, Table, Vitals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvd.console.scene import Scene
    from kvd.console.watch import Watch
    from kvd.wire.console import EventQuery
    from kvd.wire.events import Event

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


class Desk:
    """Serves every console of a node. ``events`` is ``Bus.after``."""

    def __init__(
        self,
        scene: Scene,
        events: Callable[[int], tuple[int, Sequence[Event]]],
        budget: float,
        timer: Callable[[], float] = time.thread_time,
    ) -> None:
        self.lag_s = 0.0
        """How late the loop's timer was, at worst lately; the shell writes it."""
        self._scene = scene
        scene.surveyor = Surveyor(scene.node, budget * SURVEY_SHARE, timer)
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
        lost, skipped, events = self._happened(watch.asked.events, watch.after)
        watch.after = upto = self._scene.node.out.seq
        frame = _ENCODE(Frame(watch.asked.call, head, tuple(answers), events, lost, skipped, upto))
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
                self._drop(min(self._feeds, key=lambda one: self._feeds[one].asked_s))
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
        for query in [key for key, one in self._feeds.items() if now_s - one.asked_s > FORGET_S]:
            self._drop(query)

    def _drop(self, query: Query | MapQuery) -> None:
        self._looks.pop(self._feeds.pop(query), None)

    # ---- the head, and events ----------------------------------------------------------------

    def _head(self, now_s: float) -> Vitals:
        if now_s - self._worry_s >= WORRY_S and self._may_look():
            self._worry, self._worry_s = worry(self._scene), now_s
            self._latency = self._scene.recent.latency(now_s)
        if self._vitals is None or now_s - self._vitals.at_s >= FRESH_S:
            loop = Loop(self.lag_s, self._share)
            self._vitals = vitals(self._scene, self._worry, self._latency, loop)
        return self._vitals

    def _happened(self, asked: EventQuery | None, after: int) -> tuple[int, int, tuple[Event, ...]]:
        """How many were lost, how many did not fit, and the newest that were asked for."""
        if asked is None:
            return 0, 0, ()
        lost, events = self._events(after)
        if asked.kinds:
            kinds = set(asked.kinds)
            events = [one for one in events if one.__struct_config__.tag in kinds]
        if asked.about:
            events = [one for one in events if is_about(one, asked.about)]
        skipped = max(0, len(events) - asked.limit)
        return lost, skipped, tuple(events[skipped:])


def _no_table(query: Query | MapQuery, now_s: float) -> bytes:
    name = query.view if isinstance(query, Query) else ""
    known = ", ".join(VIEWS)
    why = f"there is no table {name!r}: this daemon has {known}"
    return _ENCODE(Table(name, 0, 0, now_s, 0, 0, trouble=why))
