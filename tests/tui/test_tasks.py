"""What an operator sits down for, each answered in a few keys, on a real terminal of two sizes.

At most four keys, or twelve typed characters, Enter included: walked here as they are pressed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.daemons import two_daemons
from tests.tui.drill import stopped, wait_linked
from tests.tui.engine import engines
from tests.tui.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemons import Pair

SHAPE = {"pool.layers": "8", "pool.heads": "4", "pool.head_dim": "64", "pool.pages": "1025"}
SIZES = {(80, 24): 300, (160, 45): 310}
"""Columns and lines, and the rooms that are stuck while that is looked at."""
MOST_KEYS, MOST_TYPED = 4, 12
SPARE_PAGES = 40
OVER_A_PAGE = ("Esc  close", "Esc  leave everything as it is", "Esc leave")
"""What the last line or the buttons of whatever has the keys say."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Pair]:
    with two_daemons(tmp_path_factory.mktemp("pair"), SHAPE) as both:
        yield both


class Desk:
    """An operator before a node with a hoarder, a dead engine and a stuck handoff."""

    def __init__(self, terminal: Terminal, pair: Pair, room: int) -> None:
        self.terminal, self.pair, self.room = terminal, pair, room

    @property
    def text(self) -> str:
        return self.terminal.grid.text()

    def begins(self) -> None:
        """On the overview, with nothing open: each key when what the last one did is seen.

        Also after a test that failed with a question, a report or a bar open.
        """
        if any(words in self.text for words in OVER_A_PAGE):
            self.terminal.press("\x1b")
            self.terminal.until(
                lambda text: not any(words in text for words in OVER_A_PAGE), "the page"
            )
        for key, tab in (("2", ">2 pools<"), ("1", ">1 overview<")):
            self.terminal.press(key)
            self.terminal.until(lambda text, tab=tab: tab in text, tab)

    def walks(self, keys: str, *answers: str) -> str:
        """Press these, all at once; the screen once it says all of this."""
        is_typed = keys.lstrip("12345678")[:1] in {":", "/"}
        assert len(keys) <= (MOST_TYPED if is_typed else MOST_KEYS), keys
        self.terminal.press(keys)
        self.terminal.until(
            lambda text: all(
                re.search(answer, text) or re.search(answer, " ".join(text.split()))
                for answer in answers
            ),
            " ".join(answers),
        )
        return self.text


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def desk(pair, request) -> Iterator[Desk]:
    room = SIZES[request.param]
    decode = pair.decode.client
    with engines() as start:
        dead = start("forks", decode, "notebook", 7_000_000 + room, 1)
        dead.kill()
        start("sends", pair.prefill.client, "prefill", 1_000_000, 2)
        start("receives", decode, "decode", 1_000_000, 2, "p")
        for stuck in (room, room + 1):
            start("receives-and-keeps", decode, f"stuck-{stuck}", stuck, 1, "p")
            start("sends-some", pair.prefill.client, f"half-{stuck}", stuck, 1)
        start("works", decode, "works", 5_000_000, 2)
        start("hoards", decode, "greedy", 9_000_000, SPARE_PAGES)
        with Terminal(*request.param, "--connect", pair.decode.admin) as terminal:
            terminal.until(lambda text: "serving" in text, "a frame")
            yield Desk(terminal, pair, room)
    wait_linked(pair)


@pytest.fixture(autouse=True)
def at_first(desk) -> None:
    desk.begins()


def test_who_holds_the_most_pages_and_why(desk):
    desk.walks("2", r"most held by greedy \d+: \d{3} pages by 1 lease")


def test_which_engine_leaks(desk):
    desk.walks("1", r"client-gone: notebook is kept by pid \d+", r"\b1 lease with\b")


def test_why_a_room_is_stuck(desk):
    desk.walks(
        f":room {desk.room}\r",
        *(rf"[▸·] *{desk.room} ", rf"room {desk.room} ", r"waits for the engine to compute"),
    )


def test_what_was_evicted_last_and_whether_that_hurt(desk):
    desk.walks("6/evicted\r", r"evicted +\d+ pages in \d+ nodes")
    desk.terminal.press("1")
    desk.terminal.until(
        lambda text: re.search(r"asked for again \S+ tokens in 1m", text),
        "what was asked for again",
    )


def test_whether_the_network_or_an_engine_is_slow(desk):
    desk.walks("4", r"waits for the rest", r"waits for the engine to compute")


def test_who_has_a_page(desk):
    desk.walks(":page 17\r", r"page 17 is (held by|cached|free|in quarantine)")


def test_which_branch_of_the_tree_is_the_hottest(desk):
    text = desk.walks("3h", r"▼ \(no namespace\)", r"by -hits", r"\n[▸ ]     ( ▶|▼| ) ?\d+")
    lines = text.splitlines()
    head = next(line for line in lines if " hits" in line)
    end = head.index("hits") + len("hits ↓")
    siblings = [line for line in lines if re.match(r"[▸ ]     [▶▼ ] \d", line)]
    cells = [line[:end].split()[-1] for line in siblings]
    hits = [int(cell) for cell in cells if cell.isdecimal()]  # a row may be half painted
    assert hits == sorted(hits, reverse=True)


def test_what_is_another_than_a_minute_ago(desk):
    desk.walks("c", r"since \d\d:\d\d:\d\d, \S+ ago:", r"\+\d+ delivered")


def test_what_the_command_line_says_of_what_is_under_the_cursor(desk):
    text = desk.walks("4y", r"copied: kvd why (receive|send) \d+")
    words = re.search(r"kvd (why \S+ \d+)", text)[1].split()
    command = [sys.executable, "-m", "kvd", *words, "--connect", desk.pair.decode.admin]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "room" in said.stdout


def test_a_node_is_drained_and_serves_again(desk):
    desk.walks(":drain\r", r"What would come of it now")
    desk.walks("y", r"Esc +close")
    desk.begins()
    desk.terminal.until(lambda text: "drain" in text.splitlines()[0], "that it drains")
    desk.walks(":undrain\r", r"What would come of it now")
    desk.walks("y", r"Esc +close")
    desk.begins()
    desk.terminal.until(lambda text: " serving " in text.splitlines()[0], "that it serves")


def test_one_handoff_is_aborted(desk):
    def rooms() -> set[int]:
        return {row.room for row in desk.pair.decode.snapshot().rooms}

    assert desk.room in rooms()
    desk.walks("4\x0b\r", rf"abort room {desk.room}\b", r"What would come of it now")
    desk.terminal.press("y")  # the fourth key
    desk.terminal.until(lambda text: "Esc  close" in text, "that it is done")
    end_s = time.monotonic() + 10.0
    while desk.room in rooms() and time.monotonic() < end_s:
        time.sleep(0.1)
    assert desk.room not in rooms()


def test_which_peer_is_silent(desk):
    with stopped(desk.pair.prefill):
        desk.walks("5", r"[~!] (suspect|lost) +p ")
    wait_linked(desk.pair)
