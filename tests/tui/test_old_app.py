"""The console under a pilot at 80x24, fed with news as its link would."""

from __future__ import annotations

import msgspec
import pytest

from kvd.wire.events import Evicted
from tui.old_app import KvdTui
from tui.old_model import Answered, Console, Down, Question, Seen

SIZE = (80, 24)


class Feed:
    """A link that brings the news a test gives it."""

    def __init__(self, on_news):
        self.bring = on_news
        self.asked = []
        self.is_running = False

    def start(self):
        self.is_running = True

    def ask(self, question):
        self.asked.append(question)

    def stop(self):
        self.is_running = False


@pytest.fixture
def feeds():
    """The links that were made."""
    return []


@pytest.fixture
def app(feeds):
    def connect(on_news):
        feeds.append(Feed(on_news))
        return feeds[-1]

    return KvdTui(Console("ipc:///run/kvd/admin.sock"), connect)


def screen_of(app):
    """What the terminal shows, line by line."""
    strips = app.screen._compositor.render_strips()
    return ["".join(segment.text for segment in strip).rstrip() for strip in strips]


async def test_it_starts_by_saying_whom_it_cannot_reach_yet(app, feeds):
    async with app.run_test(size=SIZE):
        assert screen_of(app)[0] == (
            " NOT REACHABLE ipc:///run/kvd/admin.sock: connecting - trying again"
        )
        assert feeds[0].is_running
    assert not feeds[0].is_running


async def test_overview_shows_node_pools_and_totals(app, feeds, snapshot):
    async with app.run_test(size=SIZE) as pilot:
        feeds[0].bring(Seen(snapshot))
        await pilot.pause()

        lines = screen_of(app)
    assert lines[0] == " decode-node  serving  kvd 0.1.0  up 1h02m"
    assert any("128 pages: 87 free, 10 held, 28 cached, 2 quarantined; adds up" in x for x in lines)
    assert any("engines 1   leases 1   rooms 1" in x for x in lines)


@pytest.mark.parametrize(
    ("key", "fact"),
    [("2", "7 held"), ("3", "receiving"), ("4", "tcp://127.0.0.1:7402"), ("5", "evicted")],
)
async def test_number_keys_change_the_page(app, feeds, snapshot, key, fact):
    async with app.run_test(size=SIZE) as pilot:
        feeds[0].bring(Seen(snapshot, (Evicted(5, 1.0, 4, 1, "room"),)))
        await pilot.press(key)
        await pilot.pause()

        assert any(fact in line for line in screen_of(app))
        await pilot.press("1")
        await pilot.pause()
        assert not any(fact in line for line in screen_of(app))


async def test_enter_on_a_lease_asks_why_and_shows_the_answer(app, feeds, snapshot):
    async with app.run_test(size=SIZE) as pilot:
        feeds[0].bring(Seen(snapshot))
        await pilot.press("2", "enter")
        await pilot.pause()
        assert feeds[0].asked == [Question("lease", 7)]

        feeds[0].bring(Answered(Question("lease", 7), ("decode-0 holds it.", "[b]since 3 s")))
        await pilot.pause()
        assert [x.strip() for x in screen_of(app) if "holds it" in x or "since" in x] == [
            "decode-0 holds it.",
            "[b]since 3 s",
        ]

        await pilot.press("escape")
        await pilot.pause()
        assert not any("holds it" in line for line in screen_of(app))


async def test_enter_on_a_peer_asks_nothing(app, feeds, snapshot):
    async with app.run_test(size=SIZE) as pilot:
        feeds[0].bring(Seen(snapshot))
        await pilot.press("4", "enter")
        await pilot.pause()

        assert feeds[0].asked == []


async def test_the_cursor_stays_on_its_lease_while_others_come_and_go(app, feeds, snapshot):
    def with_leases(*ids):
        leases = tuple(msgspec.structs.replace(snapshot.leases[0], id=n) for n in ids)
        return Seen(msgspec.structs.replace(snapshot, leases=leases))

    async with app.run_test(size=SIZE) as pilot:
        feeds[0].bring(with_leases(1, 2, 3))
        await pilot.press("2", "down")
        feeds[0].bring(with_leases(4, 5, 2, 3))
        await pilot.pause()
        await pilot.press("enter")
        await pilot.pause()

        assert feeds[0].asked == [Question("lease", 2)]


async def test_a_lost_daemon_is_shown_over_what_was_last_seen_until_it_is_back(
    app, feeds, snapshot
):
    async with app.run_test(size=SIZE) as pilot:
        feeds[0].bring(Seen(snapshot))
        feeds[0].bring(Down("no answer within 2 s"))
        await pilot.pause()
        assert "NOT REACHABLE" in screen_of(app)[0]
        assert any("128 pages" in line for line in screen_of(app))

        feeds[0].bring(Seen(snapshot))
        await pilot.pause()
        assert screen_of(app)[0].strip().startswith("decode-node  serving")


async def test_hostile_names_reach_the_screen_as_text_only(app, feeds, snapshot):
    async with app.run_test(size=SIZE) as pilot:
        feeds[0].bring(Seen(snapshot))
        await pilot.press("2")
        await pilot.pause()

        lines = screen_of(app)
    assert any(r"evil\x1b[2J[bold]\u202etxt" in line for line in lines)


async def test_q_quits(app):
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("q")
        await pilot.pause()
    assert app.return_code == 0
