"""The console on a real terminal, before real daemons under load: it lives, and it goes quietly."""

from __future__ import annotations

import re

import pytest

from tests.support.daemons import two_daemons
from tests.tui.engine import engines
from tests.tui.terminal import ALTERNATE_SCREEN, CURSOR, WRAPPING, Terminal
from tui.model.commands import PAGES

SHAPE = {"pool.layers": "8", "pool.heads": "4", "pool.head_dim": "64", "pool.pages": "1025"}
FIRST_FRAME_S = 5.0
"""Of a machine that does much else; a quiet one needs less than one second."""
LIVE = {
    "overview": r"kv: balanced .* = 1 null",
    "pools": r"\bkv\b.*\bok\b",
    "radix": r"\(no names",
    "handoffs": r"(receiving|streaming|offered|arriving)",
    "peers": r"^. ?p\b.*\bup\b",
    "events": r"lease-(opened|released)|handoff-ended|\bmoved\b",
}
"""What stands somewhere on each page as long as the load is there."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with two_daemons(tmp_path_factory.mktemp("pair"), SHAPE) as both:
        yield both


@pytest.fixture
def load(pair):
    with engines() as start:
        start("sends", pair.prefill.client, "prefill", 1_000_000, 4)
        start("receives", pair.decode.client, "decode", 1_000_000, 4, "p")
        start("works", pair.decode.client, "works-0", 5_000_000, 2)
        yield start


def is_on(page):
    """Whether the screen shows this page, with something that lives on it."""
    tab, row = re.compile(rf">\d {page}<"), re.compile(LIVE[page], re.MULTILINE)
    return lambda text: tab.search(text) and row.search("\n".join(text.splitlines()[2:]))


def test_console_lives_on_a_real_terminal_and_leaves_it_as_it_was(pair, load, capsys):
    with Terminal(120, 36, "--connect", pair.decode.admin) as terminal:
        first_s = terminal.until(lambda text: "serving" in text, "a frame")
        took = {}
        for number, page in reversed(list(enumerate(PAGES, start=1))):
            terminal.press(str(number))
            took[page] = terminal.until(is_on(page), page)
            assert terminal.grid.text().startswith(" GOOD  d  serving")

        terminal.resize(80, 24)
        terminal.until(lambda text: "command" in text.splitlines()[-1], "80x24")
        for number in range(1, len(PAGES) + 1):
            terminal.press(str(number))
            terminal.until(is_on(PAGES[number - 1]), PAGES[number - 1])
        modes = terminal.grid.modes
        assert (ALTERNATE_SCREEN in modes, CURSOR in modes) == (True, False)
        terminal.press("q")
        status = terminal.end()

        with capsys.disabled():
            cleaned = {page: round(seconds, 2) for page, seconds in took.items()}
            print(f"\nfirst frame after {first_s:.2f} s, pages after {cleaned}")  # noqa: T201
        assert status == 0
        assert terminal.grid.modes == {CURSOR, WRAPPING}
        assert terminal.modes_of_line() == terminal.at_first
    assert first_s < FIRST_FRAME_S


def test_terminal_that_is_made_smaller_and_larger_at_once_is_painted_whole(pair):
    with Terminal(120, 36, "--connect", pair.decode.admin) as terminal:
        terminal.until(lambda text: "serving" in text, "a frame")
        for _ in range(5):
            terminal.resize(80, 24)
            terminal.resize(120, 36)
            terminal.until(lambda text: ">1 overview<" in text, "the line of pages")
        terminal.press("q")
        assert terminal.end() == 0


def test_console_outlives_its_daemon_says_why_and_comes_back(pair, capsys):
    daemon = pair.decode
    with Terminal(120, 36, "--connect", daemon.admin) as terminal:
        terminal.until(lambda text: "serving" in text, "a frame")

        daemon.kill()
        gone_s = terminal.until(lambda text: "NOT REACHABLE" in text, "that it is gone")
        terminal.until(
            lambda text: re.search(r"NOT REACHABLE \S+: \S+ \S+", text), "why", within_s=5.0
        )
        shown = terminal.grid.text()
        daemon.start()
        daemon.wait_ready()
        back_s = terminal.until(
            lambda text: not re.search("LOST|NOT REACH", text.splitlines()[0]), "that it is back"
        )
        terminal.press("2e")
        terminal.until(lambda text: ">2 pools<" in text and "engines" in text, "a page")
        terminal.press("q")
        assert terminal.end() == 0

    with capsys.disabled():
        print(f"\ngone after {gone_s:.2f} s, back {back_s:.2f} s after it serves")  # noqa: T201
        print(shown.splitlines()[0])  # noqa: T201
    assert "LOST" in shown.splitlines()[0]


def test_bytes_that_are_no_text_do_not_end_the_console(pair):
    with Terminal(80, 24, "--connect", pair.decode.admin) as terminal:
        terminal.until(lambda text: "serving" in text, "a frame")
        # What comes with half a character, or next, may be lost with it: here that is a 1.
        for raw in (b"\xfc", b"\x1b[200~\xfe\xff evict\x1b[201~", b"\xe4", b"1"):
            before = terminal.grid.text()
            terminal.send(raw)
            terminal.until(lambda text, before=before: text != before, "a frame more")
        terminal.press("5")  # right after a byte that begins a character, and not lost with it
        terminal.until(is_on("peers"), "a page")
        terminal.press("q")
        assert terminal.end() == 0


@pytest.mark.parametrize("typed", [":sort -heldAEFXqTwzs", "/state:AEFXqTwzs1234"])
def test_keys_typed_ahead_after_the_bar_is_called_are_text(pair, typed):
    assert len(typed) == 20
    with Terminal(120, 36, "--connect", pair.decode.admin, "--screen", "engines") as terminal:
        terminal.until(lambda text: "serving" in text, "a frame")
        terminal.press(typed)
        terminal.until(lambda text: f"\n{typed}" in text, "all of it in the bar")
        assert "What would come of it now" not in terminal.grid.text()
        terminal.press("\x1b")
        terminal.until(lambda text: f"\n{typed}" not in text, "the page")
        terminal.press("q")
        assert terminal.end() == 0
