"""The page of the handoffs: the table, both ends of the one under the cursor, and its keys."""

from __future__ import annotations

from kvd.core.inspect.snapshot import room_states
from kvd.wire.admin import AbortRoom, AskOtherEnd, Rehearse, Why
from tests.tui.staged import SMALL, Stage, staged
from tests.tui.town import land

HOSTILE = "[red]x\x1b[31m"
ESCAPED = r"[red]x\x1b[31m"


def rooms_of(stage: Stage) -> list[int]:
    return [one.room for one in room_states(stage.link.side.node)]


async def test_each_handoff_has_its_state_its_peer_and_how_far_it_is():
    async with staged("handoffs") as stage:
        rows = [line for line in stage.text.splitlines() if "prefill" in line][:5]
    words = [" ".join(row.split()) for row in rows]
    assert words[0].startswith("▸ 8 R receiving ← prefill0 the rest of the bytes ████████▌░░░")
    assert words[3].startswith("11 O offered ← prefill0 the prefill")
    assert words[4].startswith("7 ! failed ← prefill1 cancelled: the decode")


async def test_the_rate_is_of_the_bytes_that_came_and_says_when_it_ends():
    async with staged("handoffs") as stage:
        for _ in range(3):
            land(stage.link.town, "prefill0", 1)
            await stage.pass_time(0.4)
        first = next(line for line in stage.text.splitlines() if line.startswith("▸"))
    assert "Mi/s" in first
    assert "~" in first


async def test_the_life_of_the_one_under_the_cursor_is_shown_and_follows_it():
    async with staged("handoffs") as stage:
        assert stage.lines("#life")[0].startswith("─ receive:8  room 8  ← prefill0  R receiving ─")
        await stage.press("down")
        assert stage.lines("#life")[0].startswith("─ receive:9  room 9  ← prefill1  R receiving ─")
        assert AskOtherEnd(0, 9) in stage.asked


async def test_the_other_end_is_drawn_beside_ours():
    async with staged("handoffs", "stuck") as stage:
        lines = stage.lines("#life")
    assert lines[1].startswith("nothing for ")
    assert lines[2].startswith("deadline in ")
    assert lines[3].startswith("decode-0 decode")
    assert lines[4].startswith("prefill0 prefill")
    assert "│streaming" in lines[4]
    assert any(line.startswith("longest silence ") for line in lines)
    assert any("posts under way" in line for line in lines)


async def test_an_end_that_does_not_answer_has_its_reason_shown():
    async with staged("handoffs", "silent-peer") as stage:
        await stage.press("down")
        assert any(
            line.startswith("prefill1: it has been silent for ") for line in stage.lines("#life")
        )


async def test_one_that_failed_stays_with_its_reason_written_out_and_its_story():
    def give_up(link) -> None:
        link.answer(AbortRoom(0, 11, HOSTILE))

    async with staged("handoffs", prepare=give_up) as stage:
        await stage.press("end", "up")
        assert sum("! failed" in line for line in stage.text.splitlines()[:16]) == 2
        assert any(line.startswith("failed: ") and ESCAPED in line for line in stage.lines("#life"))
        await stage.pass_time(70.0)
        assert stage.app.page.chosen() == "receive:11"
        story = "\n".join(stage.lines("#life"))
        assert "-> closed" in story
        assert "asked for" in story


def deliver_many(link) -> None:
    """Some handoffs that went well, and fifty that did not, beside one that is stuck."""
    town = link.town
    town.hold_posts = False
    for _ in range(8):
        town.deliver_prompt(town.sides["prefill1"], town.prompt(2), 1)
    town.hold_posts = True
    for at in range(50):
        room = town.receive(town.sides["prefill1"], town.prompt(2), 2)
        link.answer(AbortRoom(0, room, f"reason {at}"))


async def test_the_stuck_one_is_on_top_whatever_was_delivered_and_the_cursor_stays_on_it():
    async with staged("handoffs", size=SMALL, prepare=deliver_many) as stage:
        assert stage.app.page.chosen() == "receive:8"
        assert "delivered" not in stage.text.splitlines()[4]
        states = [row.cells[1] for row in stage.app.page.table().data.listed()]
        assert states == sorted(states, key=["failed"].count)
        await stage.press("down", "down")
        chosen = stage.app.page.chosen()
        deliver_many(stage.link)
        await stage.pass_time(2.0)
        assert stage.app.page.chosen() == chosen
        assert stage.lines("#life")[0].startswith(f"─ {chosen} ")
        await stage.press("d", "end")
        assert stage.app.page.table().named_row().text("state") == "delivered"


async def test_a_room_that_is_not_in_sight_is_shown_with_its_own_story():
    async with staged("handoffs", size=SMALL, prepare=deliver_many) as stage:
        room = stage.link.side.recent.failed[2].end.room
        assert not stage.app.page.seek(f"room:{room}")
        await stage.press(":", *f"room {room}", "enter")
        await stage.frame()
        row = stage.app.page.table().named_row()
        assert row.number("room") == room
        assert f"only room:{room}, Esc: all" in stage.text
        assert f"room {room} " in stage.lines("#life")[0]
        assert not stage.app.card.display  # it would lie over the story, and say less
        await stage.press("escape")
        assert stage.app.page.table().data.total > 40


async def test_nobody_is_asked_about_a_life_that_is_not_to_be_seen():
    async with staged("handoffs") as stage:
        handoffs = stage.app.page
        await stage.press("5")
        stage.asked.clear()
        handoffs.ask_here()
        handoffs.ask_there()
        await stage.frame()
        assert stage.asked == []
        assert "story of both ends" not in stage.text


async def test_a_frozen_page_asks_nobody_and_shows_what_was():
    async with staged("handoffs", "stuck") as stage:
        await stage.press("space")
        before = stage.lines("#life")
        stage.asked.clear()
        await stage.pass_time(3.0)
        stage.app.page.ask_here()
        stage.app.page.ask_there()
        await stage.frame()
        assert stage.lines("#life") == before
        assert not [one for one in stage.asked if isinstance(one, Why | AskOtherEnd)]


async def test_capital_a_shows_what_would_happen_and_aborts_the_room_when_agreed():
    async with staged("handoffs") as stage:
        await stage.press("down", "ctrl+k")
        assert ":abort room 9" in stage.text
        await stage.press("enter")
        assert any(isinstance(one, Rehearse) for one in stage.asked)
        assert 9 in rooms_of(stage)
        await stage.press("y")
        aborted = [one for one in stage.asked if isinstance(one, AbortRoom)]
        assert [one.room for one in aborted] == [9]


async def test_z_leaves_those_without_a_byte_for_long():
    async with staged("handoffs", "stuck") as stage:
        await stage.press("z")
        assert "handoffs /moved>2s" in stage.text
        assert stage.app.page.table().data.total == 1
    async with staged("handoffs") as stage:
        await stage.press("z")
        assert stage.app.page.table().data.total == 0


async def test_a_column_that_is_made_here_sorts_by_what_it_is_made_of():
    async with staged("handoffs") as stage:
        stage.app.page.table().sort_by("progress")
        assert stage.app.page.table().asks().sort == "-done_bytes"


async def test_enter_opens_it_and_r_leads_to_its_peer():
    async with staged("handoffs") as stage:
        await stage.press("enter")
        assert stage.app.card.ref == "receive:8"
        await stage.press("r")
        choices = stage.text
        assert "peer:prefill0" in choices
        assert "lease:" in choices
        assert "client:" in choices
        await stage.press("escape", "escape")
        assert stage.app.card.ref == ""
        await stage.app.open("peer:prefill0")
        await stage.frame()
        assert stage.app.page.NAME == "peers"
        assert stage.app.page.chosen() == "peer:prefill0"


async def test_of_a_room_that_is_in_no_table_it_is_told_how_it_ended():
    async with staged("handoffs") as stage:
        await stage.app.open("room:999")
        await stage.frame()
        stage.app.page.ask_here()
        await stage.pilot.pause(0.1)
        await stage.frame()
        assert stage.lines("#life")[:2][1].startswith("no open handoff in room 999")
        assert stage.app.page.chosen() == "room:999"


async def test_a_room_is_found_by_its_part():
    async with staged("handoffs") as stage:
        await stage.app.open("room:10")
        await stage.frame()
        assert stage.app.page.chosen() == "receive:10"
        assert not stage.app.page.seek("room:99")
