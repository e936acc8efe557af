"""The page of the events: what its keys do, and what it shows of a real node."""

from __future__ import annotations

from kvd.wire.admin import AbortRoom, AskOtherEnd
from tests.tui.feed import resize
from tests.tui.golden import same_text
from tests.tui.staged import LARGE, SMALL, Stage, staged
from tui.model.event_log import EventGap

HOSTILE = "[red]x\x1b[31m\u202e"
ESCAPED = r"[red]x\x1b[31m\u202e"


def keys_of(stage: Stage) -> list[str]:
    return [one.key for one in stage.app.page.log_lines.entries]


def happen(stage: Stage, count: int = 1) -> None:
    """Somebody asks for a room to be given up: an event each."""
    for _ in range(count):
        stage.link.town.keep(stage.link.side, stage.link.town.prompt(4), 1)


async def test_it_follows_the_newest_until_one_goes_up():
    async with staged("events") as stage:
        last = stage.link.side.node.out.seq
        assert stage.app.page.chosen() == f"event:{last}"
        assert "following" in stage.lines("#log")[0]
        await stage.press("up", "up")
        assert stage.app.page.chosen() == f"event:{last - 2}"
        assert "2 newer below" in stage.lines("#log")[0]
        happen(stage)
        await stage.frame()
        assert stage.app.page.chosen() == f"event:{last - 2}"
        newest = stage.link.side.node.out.seq
        assert f"{newest - last + 2} newer below" in stage.lines("#log")[0]
        await stage.press("f")
        assert stage.app.page.chosen() == f"event:{newest}"
        await stage.press("up", "end")
        assert stage.app.page.chosen() == f"event:{stage.link.side.node.out.seq}"
        assert "following" in stage.lines("#log")[0]


async def test_home_and_page_keys_move_over_the_whole_log():
    async with staged("events", size=SMALL) as stage:
        total = len(keys_of(stage))
        await stage.press("home")
        assert stage.app.page.chosen() == "event:1"
        await stage.press("pagedown")
        assert stage.app.page.chosen() == f"event:{stage.app.page.log_lines.page_rows}"
        await stage.press("pageup", "down")
        assert stage.app.page.chosen() == "event:2"
        assert f"{total - 2} newer below" in stage.lines("#log")[0]


async def test_a_line_has_its_age_and_the_seconds_of_the_daemons_clock():
    async with staged("events") as stage:
        event = stage.app.page.log_lines.entry.item
        age_s = stage.link.town.now_s - event.at_s
        clock = stage.app.time_of_day(event.at_s, is_fine=True)
        assert stage.lines("#log")[-1].startswith(f"▸    {age_s:.1f}s  {clock} · moved ")
        await resize(stage.app, stage.pilot, 40, 12)
        await stage.frame()
        assert clock not in stage.text
        assert f"{age_s:.1f}s · moved             room " in stage.text.split("▸")[1]


async def test_enter_shows_the_record_and_r_leads_to_all_that_it_names():
    async with staged("events") as stage:
        await stage.press("/", *"kind=handoff-ended", "enter", "enter")
        ref = stage.app.page.chosen()
        assert stage.app.card.ref == ref
        assert "daemon's clock" in stage.text
        assert "decode prefix len" in stage.text
        links = stage.app.card.links
        assert [one.partition(":")[0] for one in links] == [
            *("receive", "room", "lease", "peer", "events")
        ]
        await stage.press("r")
        assert all(one in stage.text for one in links)
        await stage.press("4")
        assert (stage.app.page.NAME, stage.app.card.ref) == ("peers", links[3])
        await stage.press("escape")
        assert stage.app.card.ref == ref


async def test_the_record_stays_while_others_come_and_goes_with_the_cursor():
    async with staged("events") as stage:
        await stage.press("enter")
        ref = stage.app.card.ref
        happen(stage)
        await stage.frame()
        assert (stage.app.card.ref, stage.app.page.chosen()) == (ref, ref)
        await stage.press("up")
        assert stage.app.card.ref == stage.app.page.chosen() != ref


async def test_kinds_are_left_out_by_the_daemon_and_words_here():
    async with staged("events") as stage:
        await stage.press("/", *"kind:lease room", "enter")
        asked = stage.app.page.events()
        assert asked.kinds == (
            "lease-committed",
            "lease-extended",
            "lease-opened",
            "lease-released",
            "lease-written",
        )
        entries = stage.app.page.log_lines.entries
        assert entries
        assert all("room" in line for line in stage.lines("#log")[1:])
        assert "/kind:lease room" in stage.lines("#log")[0]
        await stage.press("escape")
        assert stage.app.page.events().kinds == ()
        assert len(keys_of(stage)) == stage.link.side.node.out.seq


async def test_a_filter_that_is_none_is_refused_while_it_is_typed():
    async with staged("events") as stage:
        await stage.press("/", *"colour:red", "enter")
        assert "there is no column 'colour'" in stage.text
        await stage.press("escape")
        assert stage.app.page.filter_text == ""


async def test_z_leaves_troubles_and_faults_and_brings_the_rest_back():
    async with staged("events", "leak") as stage:
        await stage.press("z")
        letters = {line[24:25] for line in stage.lines("#log")[1:]}
        assert letters == {"!", "X"}
        await stage.press("z")
        assert stage.app.page.filter_text == ""


async def test_i_leaves_what_is_about_the_same_and_escape_shows_all_again():
    async with staged("events") as stage:
        total = len(keys_of(stage))
        await stage.press("i")
        assert stage.app.page.events().about == "room:11"
        assert "about room:11" in stage.lines("#log")[0]
        assert all("room 11" in line for line in stage.lines("#log")[1:] if "~" not in line)
        await stage.press("escape", "escape")
        assert stage.app.page.events().about == ""
        assert len(keys_of(stage)) == total


async def test_of_a_room_the_other_end_tells_its_part_of_the_story_in_the_order_of_time():
    async with staged("events", "stuck") as stage:
        await stage.press("/", *"kind:moved", "enter", "i")
        await stage.frame()
        assert AskOtherEnd(0, 7) in stage.asked
        [told] = [line for line in stage.lines("#log") if " ~ prefill0 " in line]
        assert "prefill: await-engine -> streaming" in told
        at = [entry.at_s for entry in stage.app.page.log_lines.entries]
        assert at == sorted(at)


async def test_an_end_that_does_not_answer_says_so_in_the_log():
    async with staged("events", "silent-peer") as stage:
        await stage.press("/", *"kind:moved prefill1", "enter", "i")
        await stage.frame()
        assert any("~ prefill1" in line and "silent" in line for line in stage.lines("#log"))


async def test_nobody_is_asked_about_a_room_while_it_is_frozen_or_hidden(monkeypatch):
    monkeypatch.setattr("tui.screens.events.THERE_S", 60.0)  # the clock asks nothing meanwhile
    async with staged("events", "stuck") as stage:
        await stage.press("/", *"kind:moved", "enter", "i", "space")
        stage.asked.clear()
        stage.app.page.ask_there()
        page = stage.app.page
        await stage.press("space", "1")
        page.ask_there()
        await stage.frame()
        assert not [one for one in stage.asked if isinstance(one, AskOtherEnd)]


async def test_while_hidden_the_log_is_not_asked_for_and_what_was_missed_is_a_line():
    async with staged("events") as stage:
        before = stage.app.page.events()
        await stage.press("5")
        assert stage.app.wanted().events is None
        happen(stage, 300)
        await stage.press("6")
        assert stage.app.page.events() == before
        gaps = [
            one.item for one in stage.app.page.log_lines.entries if isinstance(one.item, EventGap)
        ]
        assert [gap.skipped > 0 for gap in gaps] == [True]
        assert "more than a frame takes" not in stage.text
        await stage.press("home", *["pagedown"] * 3)
        assert any("? gap" in line for line in stage.lines("#log"))


async def test_a_restart_is_a_line():
    async with staged("events") as stage:
        stage.link.restart()
        await stage.pass_time(0.5)
        [line] = [line for line in stage.lines("#log") if "! restart" in line]
        assert "decode-0 has restarted: incarnation 00000000 ended" in line
        await stage.press("home")
        assert stage.app.page.chosen() == ""


async def test_frozen_events_stand_still():
    async with staged("events") as stage:
        await stage.press("space")
        before = stage.lines("#log")
        happen(stage, 3)
        await stage.pass_time(1.0)
        assert stage.lines("#log") == before


async def test_a_click_chooses_a_line_and_a_second_one_opens_it():
    async with staged("events") as stage:
        await stage.pilot.click("#log", offset=(10, 3))
        await stage.frame()
        chosen = stage.app.page.chosen()
        assert stage.lines("#log")[3].startswith("▸")
        assert stage.app.card.ref == ""
        await stage.pilot.click("#log", offset=(10, 3), times=2)
        await stage.frame()
        assert stage.app.card.ref == chosen


async def test_hostile_reasons_are_written_out_in_the_log_and_in_the_record():
    def give_up(link) -> None:
        link.answer(AbortRoom(0, 11, HOSTILE))

    async with staged("events", size=LARGE, prepare=give_up) as stage:
        await stage.press("/", *"kind=handoff-ended", "enter")
        assert ESCAPED in stage.lines("#log")[-1]
        await stage.press("enter")
        assert any(ESCAPED in line.split("why")[-1] for line in stage.text.splitlines())
        assert "\x1b" not in stage.text
        assert "\u202e" not in stage.text


async def test_an_overloaded_node_looks_as_it_is_kept():
    async with staged("events", "overloaded", SMALL) as stage:
        same_text(stage.app, "events-overloaded")


async def test_a_room_from_both_ends_looks_as_it_is_kept():
    async with staged("events", "stuck") as stage:
        await stage.press("/", *"kind:moved", "enter", "i")
        await stage.frame()
        same_text(stage.app, "events-room")


async def test_down_and_frozen_look_as_they_are_kept():
    async with staged("events", size=SMALL) as stage:
        await stage.press("space", "up")
        await stage.pass_time(2.0)
        same_text(stage.app, "events-frozen")
        await stage.press("space")
        stage.link.down = "connection refused"
        await stage.pass_time(3.0)
        same_text(stage.app, "events-down")
