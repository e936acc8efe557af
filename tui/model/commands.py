"""The grammar of the command bar, as a table: from it come parsing, completion and help.

``parse`` makes an action as keys have it and Textual reads it, or says what is expected and where.
What the daemon is to do is the wire's own request, with call 0: whoever sends it numbers it. A word
may be cut short where only one begins so: ``:ev 100``.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable

import msgspec

from kvd.filters import SyntaxFlaw
from kvd.wire import admin
from kvd.wire.bounds import INT64, MAX_REASON

PAGES = ("overview", "pools", "radix", "handoffs", "peers", "events")
"""In the order of their number keys."""
FACES = {"engines": "pools"}
"""Other faces of a page, by their names: a key of the page turns to them."""

REASON = "an operator asked for it"


NodeRequest = admin.Plannable | admin.Audit | admin.Record
"""A verb for the daemon."""

Command = str | NodeRequest
"""An action of the console, with what it is about; or a verb for the daemon."""


class CommandChoices(msgspec.Struct, frozen=True):
    """What there is to choose from now: columns of the page, themes, refs on the screen."""

    columns: tuple[str, ...] = ()
    themes: tuple[str, ...] = ()
    refs: tuple[str, ...] = ()


class CommandRule(msgspec.Struct, frozen=True):
    """One word of the grammar, which ``usage`` begins with.

    ``make`` gets the text after the word; a flaw counts from there. ``choices`` are what may
    follow.
    """

    usage: str
    help: str
    make: Callable[[str], Command | SyntaxFlaw]
    choices: Callable[[CommandChoices], Iterable[str]] | None = None

    @property
    def word(self) -> str:
        """The first word, by which it is typed."""
        return self.usage.partition(" ")[0]


def parse(text: str) -> Command | SyntaxFlaw:
    """The command of a line, with or without its ``:``. A page's name alone shows the page."""
    start = len(text) - len(text.lstrip(": "))
    word, _, rest = text[start:].partition(" ")
    if not word:
        return SyntaxFlaw("expected a command; ? lists them", start)
    rule = _rule(word)
    if isinstance(rule, SyntaxFlaw):
        return SyntaxFlaw(rule.what, start)
    after = len(text) - len(rest.lstrip()) if rest.strip() else len(text.rstrip())
    made = rule.make(rest.strip())
    return SyntaxFlaw(made.what, after + made.at) if isinstance(made, SyntaxFlaw) else made


def complete(text: str, choices: CommandChoices) -> list[str]:
    """Lines that ``text`` may become, each whole, in the order of the table; at most 50."""
    line = text.lstrip(": ")
    word, blank, rest = line.partition(" ")
    if not blank:
        return [rule.word for rule in RULES if rule.word.startswith(word)]
    rule = _rule(word)
    if isinstance(rule, SyntaxFlaw) or rule.choices is None:
        return []
    begun = rest.lstrip()
    found = [
        choice for choice in rule.choices(choices) if choice.startswith(begun) and choice != begun
    ]
    return [f"{rule.word} {choice}" for choice in dict.fromkeys(found)][:50]


def _rule(word: str) -> CommandRule | SyntaxFlaw:
    exact = [rule for rule in RULES if rule.word == word]
    alike = exact or [rule for rule in RULES if rule.word.startswith(word)]
    if len(alike) == 1:
        return alike[0]
    if alike:
        return SyntaxFlaw(f"{word!r} may be {', '.join(rule.word for rule in alike)}", 0)
    return SyntaxFlaw(f"there is no command {word!r}; ? lists them", 0)


# ---- what follows a word -------------------------------------------------------------------------


def _nothing(command: Command) -> Callable[[str], Command | SyntaxFlaw]:
    return lambda rest: SyntaxFlaw(f"expected nothing more, not {rest!r}", 0) if rest else command


def _whole(text: str, what: str) -> int | SyntaxFlaw:
    """A number from 0 on that the wire can carry."""
    if not text.isascii() or not text.isdigit() or int(text[:20]) > INT64:
        told = f", not {text!r}" if text else ""
        return SyntaxFlaw(f"expected {what}{told}", 0)
    return int(text)


def _open(ref: str) -> str:
    return f"open({ref!r})"


def _numbered(kind: str) -> Callable[[str], Command | SyntaxFlaw]:
    def make(rest: str) -> Command | SyntaxFlaw:
        number = _whole(rest, f"the number of a {kind}")
        return number if isinstance(number, SyntaxFlaw) else _open(f"{kind}:{number}")

    return make


def _page(rest: str) -> Command | SyntaxFlaw:
    component, _, text = rest.rpartition(":")
    number = _whole(text, "a page: 17, or swa:17 for one of another component")
    if isinstance(number, SyntaxFlaw):
        return number
    return _open(f"page:{component}:{number}" if component else f"page:{number}")


def _peer(rest: str) -> Command | SyntaxFlaw:
    return _open(f"peer:{rest}") if rest else SyntaxFlaw("expected the name of a peer", 0)


def _ref(rest: str) -> Command | SyntaxFlaw:
    # As the command line has it, too: ``why lease 7``.
    rest = rest if ":" in rest.partition(" ")[0] else rest.replace(" ", ":", 1)
    kind, colon, name = rest.partition(":")
    if not (kind and colon and name) or " " in kind:
        return SyntaxFlaw("expected what to open: lease:7, node:9, room:12, peer:prefill-0", 0)
    return _open(rest)


def _sort(rest: str) -> Command | SyntaxFlaw:
    if " " in rest:
        return SyntaxFlaw("expected one column, with a - for the largest first", rest.index(" "))
    return f"sort_by({rest!r})"


def _flush(rest: str) -> Command | SyntaxFlaw:
    if rest not in {"", "strict"}:
        return SyntaxFlaw(f"expected nothing, or strict, not {rest!r}", 0)
    return admin.Flush(0, rest or "unlocked")


def _evict(rest: str) -> Command | SyntaxFlaw:
    pages = _whole(rest, "how many pages")
    if pages == 0:
        return SyntaxFlaw("expected at least 1 page", 0)
    return pages if isinstance(pages, SyntaxFlaw) else admin.Evict(0, pages)


def _abort(rest: str) -> Command | SyntaxFlaw:
    word, _, more = rest.partition(" ")
    if word != "room":
        return SyntaxFlaw("expected room and its number: abort room 12", 0)
    text, _, reason = more.strip().partition(" ")
    room = _whole(text, "the number of a room: abort room 12")
    if isinstance(room, SyntaxFlaw):
        return SyntaxFlaw(room.what, len(rest) - len(more.strip()))
    if len(reason) > MAX_REASON:
        return SyntaxFlaw(f"a reason has at most {MAX_REASON} characters", len(rest) - len(reason))
    return admin.AbortRoom(0, room, reason.strip() or REASON)


def _drain(reason: str) -> Command | SyntaxFlaw:
    if len(reason) > MAX_REASON:
        return SyntaxFlaw(f"a reason has at most {MAX_REASON} characters", MAX_REASON)
    return admin.Drain(0, who="console", why=reason or REASON)


def cli_command(ref: str) -> str:
    """What to type on the node to be told the same: ``kvd why receive 4``."""
    kind, _, rest = ref.partition(":")
    if kind in {"page", "node", "room", "lease", "receive", "send", "client", "peer"}:
        return f"kvd why {kind} {shlex.quote(rest)}"
    verbs = {"pool": "pools", "event": "events", "concern": "audit", "waiting": "status"}
    return f"kvd {verbs.get(kind, 'status')}"


KILL = "kill "
"""How what an operator has to do on the node itself begins, in front of why."""


def is_doable(action: str) -> bool:
    """Whether what is proposed is a command, and no mere words."""
    return action.startswith(KILL) or not isinstance(parse(action), SyntaxFlaw)


def _record(rest: str) -> Command | SyntaxFlaw:
    if rest != "save":
        return SyntaxFlaw(
            "expected save: what the daemon's flight recorder has goes to a file there", 0
        )
    return admin.Record(0)


def _refs(kind: str) -> Callable[[CommandChoices], Iterable[str]]:
    """What follows ``lease`` is what follows ``lease:`` of the refs on the screen."""
    head = f"{kind}:"
    return lambda choices: [ref[len(head) :] for ref in choices.refs if ref.startswith(head)]


RULES: tuple[CommandRule, ...] = (
    *(
        CommandRule(page, f"show the page {page}", _nothing(f"go({page!r})"))
        for page in (*PAGES, *FACES)
    ),
    CommandRule("help", "show the keys", _nothing("help")),
    *(
        CommandRule(f"{kind} N", f"open a {kind}", _numbered(kind), choices=_refs(kind))
        for kind in ("lease", "node", "room", "client")
    ),
    CommandRule("page [COMPONENT:]N", "open a page", _page, choices=_refs("page")),
    CommandRule("peer NAME", "open a peer", _peer, choices=_refs("peer")),
    *(
        CommandRule(f"{word} REF", words, _ref, choices=lambda now: now.refs)
        for word, words in (
            ("open", "open it: lease:7, receive:3"),
            ("why", "who holds it, why, since when: lease:7, lease 7, page 17, peer NAME"),
        )
    ),
    CommandRule(
        "filter [TEXT]",
        "show only rows like this; nothing: all",
        lambda text: f"filter_by({text!r})",
        choices=lambda now: [f"{name}:" for name in now.columns],
    ),
    CommandRule(
        "sort [-]COLUMN",
        "sort by a column; -: the largest first",
        _sort,
        choices=lambda now: [*now.columns, *(f"-{name}" for name in now.columns)],
    ),
    CommandRule(
        "theme [NAME]",
        "other colours",
        lambda name: f"set_theme({name!r})" if name else "next_theme",
        choices=lambda now: now.themes,
    ),
    CommandRule(
        "flush [strict]",
        "drop every unlocked cached page; strict: nothing if any is locked",
        _flush,
        choices=lambda _: ("strict",),
    ),
    CommandRule("evict N", "evict at least N pages", _evict),
    CommandRule(
        "abort room N [REASON]",
        "give up every part of a room here",
        _abort,
        choices=lambda now: ["room", *(f"room {number}" for number in _refs("room")(now))],
    ),
    CommandRule("drain [REASON]", "begin nothing new, end what runs", _drain),
    CommandRule(
        "epoch [NAMESPACE]",
        "new weights: what is cached in it is never found again",
        lambda rest: admin.RaiseEpoch(0, rest),
    ),
    CommandRule("undrain", "serve again", _nothing(admin.Undrain(0))),
    CommandRule("fence", "restart the transfer process", _nothing(admin.Fence(0))),
    CommandRule("audit", "check every invariant now", _nothing(admin.Audit(0))),
    CommandRule("record save", "save the flight recorder", _record, choices=lambda _: ("save",)),
    CommandRule("quit", "quit", _nothing("quit")),
)
