"""The engines: whether they live, what they hold, what can be done, and its keys."""

from __future__ import annotations

import pytest

from tests.tui.golden import same_text
from tests.tui.staged import SMALL, Stage, staged

HOSTILE = "[red]x\x1b[31m"
ESCAPED = r"[red]x\x1b[31m"


def leases_of(stage: Stage) -> set[str]:
    """Whose the leases are that are shown."""
    data = stage.app.page.leases.data
    return {data.cell(key, "client") for key in data.order}


async def test_a_client_has_a_letter_and_a_word_for_whether_it_lives():
    async with staged("engines", "dead-client", SMALL) as stage:
        rows = [" ".join(line.split()) for line in stage.text.splitlines()]
        assert any(row.startswith("sglang-1 not said ! outlived") for row in rows)
        assert any(row.startswith("sglang-0 not said + alive") for row in rows)


async def test_no_engine_is_without_a_kind():
    """One of before a restart, and one of an older library, say none."""
    async with staged("engines") as stage:
        data = stage.app.page.clients.data
        assert {data.cell(key, "kind") for key in data.order} == {""}
        assert stage.text.count("not said") == data.total > 0


async def test_calls_are_told_per_second():
    async with staged("engines") as stage:
        server = stage.link._desk
        server._scene.engines.calls = lambda session: int(100 * stage.link.town.now_s)
        for _ in range(4):
            await stage.pass_time(1.0)
        table = stage.app.page.table()
        assert table.data.cell("client:1", "calls_s") == pytest.approx(100, abs=2)


async def test_below_are_the_leases_of_the_client_under_the_cursor():
    async with staged("engines") as stage:
        await stage.press("down")
        assert "leases of sglang-0 (client:1)" in stage.text
        assert leases_of(stage) == {"client:1"}
        await stage.press("down")
        assert leases_of(stage) == {"client:2"}


async def test_tab_goes_to_the_leases_and_a_filter_there_is_on_top_of_whose_they_are():
    async with staged("engines") as stage:
        await stage.press("down", "tab")
        assert stage.app.page.chosen().startswith("lease:")
        await stage.press("/", *"room=1", "enter")
        assert leases_of(stage) == {"client:1"}
        assert stage.app.page.leases.data.total == 1


async def test_a_lease_that_is_gone_to_is_shown_until_another_client_is_chosen():
    async with staged("engines") as stage:
        await stage.app.open("lease:11")
        await stage.frame()
        assert stage.app.page.chosen() == "lease:11"
        assert stage.app.card.ref == "lease:11"
        assert leases_of(stage) == {"client:2"}
        await stage.press("tab", "down")
        assert "leases of sglang-0 (client:1)" in stage.text


async def test_z_leaves_clients_whose_processes_are_gone():
    async with staged("engines", "dead-client") as stage:
        await stage.press("z")
        assert list(stage.app.page.table().data.order) == ["client:2"]


async def test_h_shows_its_handoffs():
    async with staged("engines") as stage:
        await stage.press("down", "h")
        assert stage.app.page.NAME == "handoffs"
        assert [stage.app.page.table().data.cell(key, "client") for key in
                stage.app.page.table().data.order] == ["client:1", "client:1"]  # fmt: skip


async def test_a_hostile_name_is_written_out_wherever_it_stands():
    def join(link) -> None:
        link.town.d.join(HOSTILE, 999)

    async with staged("engines", prepare=join) as stage:
        await stage.press("home", "enter")
        assert stage.app.page.chosen() == "client:4"
        assert stage.text.count(ESCAPED) >= 3
        assert "\x1b" not in stage.text


async def test_of_ten_thousand_leases_only_those_on_the_screen_are_asked_for():
    async with staged("engines", "overloaded") as stage:
        await stage.press("down", "tab", "end")
        table = stage.app.page.leases
        assert table.data.total > 1000
        assert len(table.data.rows) < 60
        assert table.chosen() == table.data.order[-1]
        same_text(stage.app, "engines-overloaded")
