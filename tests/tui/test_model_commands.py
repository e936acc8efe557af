"""The command bar: what a line means, what is expected, what it may become."""

from __future__ import annotations

import pytest

from kvd.filters import SyntaxFlaw
from kvd.wire.admin import AbortRoom, Audit, Drain, Evict, Fence, Flush, Record, Undrain
from tui.model.commands import RULES, CommandChoices, complete, parse


@pytest.mark.parametrize(
    ("text", "command"),
    [
        (":pools", "go('pools')"),
        ("  pools ", "go('pools')"),
        (":po", "go('pools')"),
        (":lease 7", "open('lease:7')"),
        (":page 17", "open('page:17')"),
        (":page swa:17", "open('page:swa:17')"),
        (":node 9", "open('node:9')"),
        (":room 12", "open('room:12')"),
        (":peer prefill-0", "open('peer:prefill-0')"),
        (":peers", "go('peers')"),
        (":client 3", "open('client:3')"),
        (":open receive:3", "open('receive:3')"),
        (":filter state:held age>5s", "filter_by('state:held age>5s')"),
        (":filter", "filter_by('')"),
        (":sort -age", "sort_by('-age')"),
        (":theme nord", "set_theme('nord')"),
        (":flush", Flush(0, "unlocked")),
        (":flush strict", Flush(0, "strict")),
        (":evict 100", Evict(0, 100)),
        (":abort room 12", AbortRoom(0, 12, "an operator asked for it")),
        (":abort room 12 it is stuck", AbortRoom(0, 12, "it is stuck")),
        (":fence", Fence(0)),
        (":drain", Drain(0, "console", "an operator asked for it")),
        (":drain new switch", Drain(0, "console", "new switch")),
        (":undrain", Undrain(0)),
        (":why lease:7", "open('lease:7')"),
        (":why page 17", "open('page:17')"),
        (":audit", Audit(0)),
        (":record save", Record(0)),
        (":q", "quit"),
    ],
)
def test_a_line_is_a_command(text, command):
    assert parse(text) == command


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        (":", SyntaxFlaw("expected a command; ? lists them", 1)),
        (":explode", SyntaxFlaw("there is no command 'explode'; ? lists them", 1)),
        (":pe", SyntaxFlaw("'pe' may be peers, peer", 1)),
        (":lease", SyntaxFlaw("expected the number of a lease", 6)),
        (":lease seven", SyntaxFlaw("expected the number of a lease, not 'seven'", 7)),
        (
            ":page swa:x",
            SyntaxFlaw("expected a page: 17, or swa:17 for one of another component, not 'x'", 6),
        ),
        (
            ":node 99999999999999999999",
            SyntaxFlaw("expected the number of a node, not '99999999999999999999'", 6),
        ),
        (":evict 0", SyntaxFlaw("expected at least 1 page", 7)),
        (":evict -3", SyntaxFlaw("expected how many pages, not '-3'", 7)),
        (":abort 12", SyntaxFlaw("expected room and its number: abort room 12", 7)),
        (":abort room x", SyntaxFlaw("expected the number of a room: abort room 12, not 'x'", 12)),
        (":flush all", SyntaxFlaw("expected nothing, or strict, not 'all'", 7)),
        (":fence now", SyntaxFlaw("expected nothing more, not 'now'", 7)),
        (":sort a b", SyntaxFlaw("expected one column, with a - for the largest first", 7)),
        (
            ":open lease",
            SyntaxFlaw("expected what to open: lease:7, node:9, room:12, peer:prefill-0", 6),
        ),
    ],
)
def test_a_flaw_says_what_is_expected_and_where(text, flaw):
    assert parse(text) == flaw


CONTEXT = CommandChoices(("id", "state"), ("dark", "light"), ("lease:7", "lease:71", "room:12"))


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (":pe", ["peers", "peer"]),
        (":lease ", ["lease 7", "lease 71"]),
        (":lease 7", ["lease 71"]),
        (":sort -", ["sort -id", "sort -state"]),
        (":filter st", ["filter state:"]),
        (":theme d", ["theme dark"]),
        (":abort ", ["abort room", "abort room 12"]),
        (":evict ", []),
        (":nonsense x", []),
    ],
)
def test_a_line_is_completed_from_what_is_on_the_screen(text, lines):
    assert complete(text, CONTEXT) == lines


def test_an_empty_bar_offers_every_command():
    assert complete(":", CONTEXT) == [rule.word for rule in RULES]
