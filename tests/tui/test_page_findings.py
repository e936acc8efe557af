"""Findings on the overview with their evidence, the books, the queue, and their keys."""

from __future__ import annotations

import re

from kvd.core import inputs
from kvd.core.audit.audit import EVERY_S
from kvd.wire.admin import Audit, Drain, Rehearse
from tests.tui.staged import LARGE, staged
from tui.widgets.problems import ProblemCards

HOSTILE = "[red]x\x1b[31m\u202e"
ESCAPED = r"[red]x\x1b[31m\u202e"


def sweep(link) -> None:
    """The standing audit looks at everything once, in half a second."""
    node = link.side.node
    link.town.now_s += EVERY_S
    while not node.audit.sweeps:
        node.step(inputs.AuditTurn(link.town.now_s, 100))
        link.town.now_s += 0.25


async def test_a_finding_has_its_letter_its_sentence_and_what_to_do():
    async with staged("overview", "leak") as stage:
        cards = stage.lines(ProblemCards)
        assert cards[1].startswith("▸ ! HIGH   violation: I1: 3 pages, the first is 618, are now")
        assert cards[2].strip() == "press x: audit   Enter: pool:kv"
        assert cards[3].startswith("  ▲ MEDIUM stuck-handoff: room ")
        assert re.search(r"^ +press x: open receive:\d+", "\n".join(cards), re.M)


async def test_books_that_do_not_balance_say_by_how_much():
    async with staged("overview", "leak") as stage:
        assert stage.lines("#ledger")[1].startswith("! kv: 3 NOWHERE  1 021 of 1 024 = 1 null + ")
    async with staged("overview") as stage:
        line = stage.lines("#ledger")[1]
        assert line.startswith("  kv: balanced  1 024 of 1 024 = 1 null + 620 free + 145 held + ")


async def test_every_component_has_its_books():
    async with staged("overview", "mixture") as stage:
        names = [line.split()[0] for line in stage.lines("#ledger")[1:] if "null" in line]
        assert names == ["kv:", "swa:", "state:"]


async def test_the_audit_says_when_it_looked_and_what_that_cost():
    async with staged("overview") as stage:
        assert stage.lines("#ledger")[-1] == "  audit: nothing found  no sweep has ended yet"
    async with staged("overview", prepare=sweep) as stage:
        line = " ".join(stage.lines("#ledger")[-2:])
        assert "audit: nothing found  last sweep " in line
        assert "1024 pages; cost 0.00% of a core" in line
        assert "in 1 sweeps" in line


async def test_a_checks_every_invariant_now_and_shows_what_came_of_it():
    async with staged("overview", "leak") as stage:
        await stage.press("a")
        assert Audit(0) in stage.asked
        assert "I1: 3 pages, the first is 618, are nowhere" in stage.text
        assert "standing audit: 1 finding now" in stage.text
        await stage.press("escape")
        assert "standing audit" not in stage.text


async def test_x_puts_the_proposed_command_into_the_bar_and_enter_does_it():
    async with staged("overview", "leak") as stage:
        await stage.press("down", "x")
        subject = stage.app.page.problems.named_row().text("subject")
        assert f":open {subject}" in stage.text
        assert stage.app.page.NAME == "overview"
        await stage.press("enter")
        assert (stage.app.page.NAME, stage.app.card.ref) == ("handoffs", subject)


async def test_what_changes_something_is_rehearsed_and_asked_as_always():
    drain = Drain(0, "root", "new switch")
    async with staged("overview", "empty", prepare=lambda link: link.answer(drain)) as stage:
        assert "press x: undrain" in stage.text
        await stage.press("x", "enter")
        assert any(isinstance(one, Rehearse) for one in stage.asked)
        assert "What would come of it now" in stage.text
        await stage.press("y", "escape")
        await stage.pass_time(2.0)
        assert "draining" not in stage.text


async def test_what_is_to_be_done_on_the_node_is_copied():
    async with staged("overview", "dead-client") as stage:
        action = stage.app.page.problems.named_row().text("action")
        await stage.press("x")
        assert action.split(":")[0] in stage.text
        assert not stage.app.bar.display


async def test_the_queue_is_of_those_who_lack_pages_and_x_opens_who_is_in_the_way():
    async with staged("overview", "overloaded", LARGE) as stage:
        await stage.press("tab")
        assert stage.app.page.chosen() == "waiting:2"
        assert "requests that wait for pages" in stage.text
        await stage.press("x")
        assert re.search(r":open (client|lease):\d", stage.text)


async def test_z_leaves_out_what_is_not_grave():
    async with staged("overview") as stage:
        await stage.pass_time(2.5)
        assert stage.app.page.problems.data.total > 0
        await stage.press("z")
        assert "problems /!severity:low" in stage.text


async def test_hostile_names_are_written_out():
    def die(link) -> None:
        session = link.side.join(HOSTILE, 4999)
        link.side.lease(link.town.prompt(4), session=session)
        link.town.die(4999)
        link.pass_time(3.0)

    async with staged("overview", size=LARGE, prepare=die) as stage:
        assert "\x1b" not in stage.text
        assert "\u202e" not in stage.text
        assert ESCAPED in stage.text
