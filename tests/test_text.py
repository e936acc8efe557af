"""Figures and strings for people."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.text import bar, clean, duration, endpoint_flaw, event_line, progress, room, share
from kvd.types import amount
from kvd.wire.events import MessageRefused
from tests.cli.admin_peer import ROOM


@given(st.text())
def test_clean_leaves_nothing_that_steers_a_terminal(text):
    assert clean(text).isprintable()


@given(st.text(st.characters(categories=["L", "N", "P", "S", "M"])))
def test_clean_leaves_readable_text_alone(text):
    assert clean(text) == text


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (2**31, "2.0 GiB"), (2**62, "4096.0 PiB")],
)
def test_amount(size_bytes, shown):
    assert amount(size_bytes) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.034, "0.03s"),
        (59.94, "59.9s"),
        (185, "3m05s"),
        (7620, "2h07m"),
        (356400, "4d03h"),
        (-2, "-2.00s"),
    ],
)
def test_duration(seconds, shown):
    assert duration(seconds) == shown


def test_bar_shows_whatever_exists():
    assert bar(held=1, cached=0, quarantined=1, total=100_000, width=8) == "HQ......"
    assert bar(held=50, cached=50, quarantined=0, total=100, width=8) == "HHHHCCCC"
    assert bar(held=0, cached=0, quarantined=0, total=0, width=4) == "...."


def test_absence_is_not_a_number():
    assert (room(0), room(9117)) == ("-", "9117")
    assert (share(0, 0), share(1, 3)) == ("0/0", "1/3 33%")


def test_event_line_quotes_text_with_blanks_and_cleans_it():
    event = MessageRefused(
        7, 1.5, socket="peer", sender="\x1b]0;x", code="bad-request", why="3 bytes are no message"
    )

    assert event_line(event) == (
        "       7        1.500  message-refused    socket=peer sender=\\x1b]0;x "
        'code=bad-request why="3 bytes are no message"'
    )


@pytest.mark.parametrize(("side", "expected"), [("decode", "2/6 33%"), ("prefill", "3/6 50%")])
def test_progress_counts_what_arrived_or_what_was_posted(side, expected):
    one = msgspec.structs.replace(ROOM, side=side, posted_pages=3, moved_bytes=5 * 2**20)

    assert progress(one) == expected


@pytest.mark.parametrize("text", ["tcp://127.0.0.1:1", "/run/kvd/admin.sock", "ipc://", ""])
def test_an_endpoint_that_is_no_unix_socket_has_a_flaw_that_names_one(text):
    assert "write ipc:///run/kvd/admin.sock" in (endpoint_flaw(text) or "")
    assert endpoint_flaw("ipc:///run/kvd/admin.sock") is None
