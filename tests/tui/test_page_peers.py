"""The page of the peers: both directions of each, the one under the cursor in words, its keys."""

from __future__ import annotations

from kvd.wire.admin import Fence, Rehearse
from tests.tui.staged import SMALL, Stage, staged
from tests.tui.town import land
from tui.screens.peers import UNKNOWN


def panel_of(stage: Stage) -> str:
    return "\n".join(stage.lines("#peer"))


async def test_each_peer_has_both_ways_and_what_became_of_its_handoffs():
    async with staged("peers") as stage:
        names = stage.text.splitlines()[3].split()
        first = stage.text.splitlines()[4].split()
    assert names[:6] == ["state", "name", "in", "out", "open", "delivered"]
    assert first[:4] == ["▸", "+", "up", "prefill0"]
    assert "←3 →0" in " ".join(first)


async def test_bytes_that_come_are_a_rate_and_a_chart():
    async with staged("peers") as stage:
        for _ in range(4):
            land(stage.link.town, "prefill0", 1)
            await stage.pass_time(0.6)
        row = stage.text.splitlines()[4]
        assert "Mi/s" in row
        assert "from it" in panel_of(stage)
        assert "⣿" in panel_of(stage)


async def test_a_peer_that_is_lost_is_told_in_words_and_stands_out():
    async with staged("peers", "silent-peer", SMALL) as stage:
        assert "  ! lost  prefill1" in stage.text
        await stage.press("down")
        assert "! lost: it has been silent for so long that it counts as gone" in panel_of(stage)


async def test_the_one_under_the_cursor_has_its_layout_and_its_agent():
    async with staged("peers") as stage:
        words = panel_of(stage)
    assert "layout same" in words
    assert "agent loaded" in words
    assert "posts under way" in words


async def test_what_one_daemon_cannot_know_is_not_drawn_and_said_to_be_unknown():
    async with staged("peers") as stage:
        assert UNKNOWN in stage.text


async def test_z_leaves_peers_that_are_not_up():
    async with staged("peers", "silent-peer") as stage:
        await stage.press("z")
        assert list(stage.app.page.table().data.order) == ["peer:prefill1"]
        await stage.press("z")
        assert stage.app.page.table().data.total == 2


async def test_h_shows_its_handoffs():
    async with staged("peers") as stage:
        await stage.press("down", "h")
        assert stage.app.page.NAME == "handoffs"
        assert 'handoffs /peer="peer:prefill1"' in stage.text
        assert {"prefill0"} & set(stage.text.split()) == set()


async def test_capital_x_shows_what_a_fence_would_do():
    async with staged("peers") as stage:
        await stage.press("ctrl+x")
        assert Rehearse(0, Fence(0)) in stage.asked


async def test_a_hostile_name_is_written_out():
    def rename(link) -> None:
        peers = link.side.node.peers
        peer = peers.by_name.pop("prefill1")
        peer.name = "[red]x\x1b[31m"
        peers.by_name[peer.name] = peer

    async with staged("peers", prepare=rename) as stage:
        assert r"[red]x\x1b[31m" in stage.text
        assert "\x1b" not in stage.text


async def test_enter_opens_the_card_of_the_peer():
    async with staged("peers") as stage:
        await stage.press("down", "enter")
        assert stage.app.card.ref == "peer:prefill1"
        await stage.press("escape")
        assert stage.app.card.ref == ""
