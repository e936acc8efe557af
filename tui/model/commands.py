"""The grammar of the command bar, as a table: from it come parsing, completion and help.

``parse`` makes a typed command, or says what is expected and where. What changes something on the
node is ``Ask``, whose request is the wire's own, with call 0: whoever sends it numbers it. A word
may be cut short where only one begins so: ``:ev 100``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from kvd.filters import SyntaxFlaw
from kvd.wire.admin import AbortRoom, Audit, Evict, Fence, Flush, Record
from kvd.wire.bounds import INT64, MAX_REASON
from tui.model.export import FORMATS

PAGES = ("overview", "pools", "radix", "handoffs", "peers", "events", "inspect", "clients", "help")
MOST_FPS = 20.0
LEAST_FPS = 0.2
REASON = "an operator asked for it"


class Show(msgspec.Struct, frozen=True):
    """Go to a page."""

    page: str


class Open(msgspec.Struct, frozen=True):
    """Open one thing: ``lease:7``, ``page:swa:17``, ``peer:prefill-0``."""

    ref: str


class FilterBy(msgspec.Struct, frozen=True):
    """Filter the page; an empty text shows everything again."""

    text: str


class SortBy(msgspec.Struct, frozen=True):
    """Sort the page: a column, ``-column`` for the largest first, empty for its own order."""

    column: str


class SetFps(msgspec.Struct, frozen=True):
    """Paint so often."""

    fps: float


class SetTheme(msgspec.Struct, frozen=True):
    """Paint in these colours; empty: the next ones."""

    name: str


class Export(msgspec.Struct, frozen=True):
    """Write the table of the page to a file, in one of the formats; ``svg`` is the screen."""

    form: str
    path: str


class Ask(msgspec.Struct, frozen=True):
    """A verb for the daemon."""

    request: Flush | Evict | AbortRoom | Fence | Audit | Record


class Quit(msgspec.Struct, frozen=True):
    """Leave."""


Command = Show | Open | FilterBy | SortBy | SetFps | SetTheme | Export | Ask | Quit


class Context(msgspec.Struct, frozen=True):
    """What there is to choose from now: columns of the page, themes, refs on the screen."""

    columns: tuple[str, ...] = ()
    themes: tuple[str, ...] = ()
    refs: tuple[str, ...] = ()


class Rule(msgspec.Struct, frozen=True):
    """One word of the grammar. ``needs``: ``write`` where it changes something on the node.

    ``make`` gets the text after the word; a flaw counts from there. ``choices`` are what
    may follow.
    """

    word: str
    usage: str
    help: str
    make: Callable[[str], Command | SyntaxFlaw]
    choices: Callable[[Context], Iterable[str]] | None = None
    needs: str = ""


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


def complete(text: str, context: Context) -> list[str]:
    """Lines that ``text`` may become, each whole, in the order of the table; at most 50."""
    line = text.lstrip(": ")
    word, blank, rest = line.partition(" ")
    if not blank:
        return [rule.word for rule in RULES if rule.word.startswith(word)]
    rule = _rule(word)
    if isinstance(rule, SyntaxFlaw) or rule.choices is None:
        return []
    begun = rest.lstrip()
    found = [one for one in rule.choices(context) if one.startswith(begun) and one != begun]
    return [f"{rule.word} {one}" for one in dict.fromkeys(found)][:50]


def _rule(word: str) -> Rule | SyntaxFlaw:
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


def _numbered(kind: str) -> Callable[[str], Command | SyntaxFlaw]:
    def make(rest: str) -> Command | SyntaxFlaw:
        number = _whole(rest, f"the number of a {kind}")
        return number if isinstance(number, SyntaxFlaw) else Open(f"{kind}:{number}")

    return make


def _page(rest: str) -> Command | SyntaxFlaw:
    component, _, text = rest.rpartition(":")
    number = _whole(text, "a page: 17, or swa:17 for one of another component")
    if isinstance(number, SyntaxFlaw):
        return number
    return Open(f"page:{component}:{number}" if component else f"page:{number}")


def _peer(rest: str) -> Command | SyntaxFlaw:
    return Open(f"peer:{rest}") if rest else SyntaxFlaw("expected the name of a peer", 0)


def _ref(rest: str) -> Command | SyntaxFlaw:
    kind, colon, name = rest.partition(":")
    if not (kind and colon and name) or " " in kind:
        return SyntaxFlaw("expected what to open: lease:7, node:9, room:12, peer:prefill-0", 0)
    return Open(rest)


def _filter(rest: str) -> Command | SyntaxFlaw:
    return FilterBy(rest)


def _sort(rest: str) -> Command | SyntaxFlaw:
    if " " in rest:
        return SyntaxFlaw("expected one column, with a - for the largest first", rest.index(" "))
    return SortBy(rest)


def _set(rest: str) -> Command | SyntaxFlaw:
    name, _, value = rest.partition(" ")
    if name != "fps":
        return SyntaxFlaw("expected fps and a number: set fps 4", 0)
    number = value.strip()
    if not number.replace(".", "", 1).isdigit() or not number.isascii():
        return SyntaxFlaw("expected frames per second: set fps 4", len(rest) - len(number))
    if not LEAST_FPS <= float(number) <= MOST_FPS:
        return SyntaxFlaw(f"fps is from {LEAST_FPS:g} to {MOST_FPS:g}", len(rest) - len(number))
    return SetFps(float(number))


def _theme(rest: str) -> Command | SyntaxFlaw:
    return SetTheme(rest)


def _export(rest: str) -> Command | SyntaxFlaw:
    form, _, path = rest.partition(" ")
    if form not in (*FORMATS, "svg"):
        return SyntaxFlaw(f"expected one of {', '.join(FORMATS)}, svg, and a file", 0)
    if not path.strip():
        return SyntaxFlaw(f"expected a file: export {form} FILE", len(rest))
    return Export(form, path.strip())


def _flush(rest: str) -> Command | SyntaxFlaw:
    if rest not in {"", "strict"}:
        return SyntaxFlaw(f"expected nothing, or strict, not {rest!r}", 0)
    return Ask(Flush(0, rest or "unlocked"))


def _evict(rest: str) -> Command | SyntaxFlaw:
    pages = _whole(rest, "how many pages")
    if pages == 0:
        return SyntaxFlaw("expected at least 1 page", 0)
    return pages if isinstance(pages, SyntaxFlaw) else Ask(Evict(0, pages))


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
    return Ask(AbortRoom(0, room, reason.strip() or REASON))


def _record(rest: str) -> Command | SyntaxFlaw:
    if rest != "save":
        return SyntaxFlaw(
            "expected save: what the daemon's flight recorder has goes to a file there", 0
        )
    return Ask(Record(0))


def _refs(kind: str) -> Callable[[Context], Iterable[str]]:
    """What follows ``lease`` is what follows ``lease:`` of the refs on the screen."""
    head = f"{kind}:"
    return lambda context: [one[len(head) :] for one in context.refs if one.startswith(head)]


RULES: tuple[Rule, ...] = (
    *(Rule(page, page, f"show the page {page}", _nothing(Show(page))) for page in PAGES),
    *(
        Rule(kind, f"{kind} N", f"open a {kind}", _numbered(kind), _refs(kind))
        for kind in ("lease", "node", "room", "client")
    ),
    Rule("page", "page [COMPONENT:]N", "open a page", _page, _refs("page")),
    Rule("peer", "peer NAME", "open a peer", _peer, _refs("peer")),
    Rule("open", "open REF", "open it: lease:7, receive:3", _ref, lambda context: context.refs),
    Rule(
        "filter",
        "filter [TEXT]",
        "show only rows like this; nothing: all",
        _filter,
        lambda context: [f"{name}:" for name in context.columns],
    ),
    Rule(
        "sort",
        "sort [-]COLUMN",
        "sort by a column; -: the largest first",
        _sort,
        lambda context: [*context.columns, *(f"-{name}" for name in context.columns)],
    ),
    Rule("set", "set fps N", "paint N times a second", _set, lambda _: ("fps",)),
    Rule("theme", "theme [NAME]", "other colours", _theme, lambda context: context.themes),
    Rule(
        "export",
        "export csv|json|text|svg FILE",
        "write this view to a file",
        _export,
        lambda _: (*FORMATS, "svg"),
    ),
    Rule(
        "flush",
        "flush [strict]",
        "drop every unlocked cached page; strict: nothing if any is locked",
        _flush,
        lambda _: ("strict",),
        "write",
    ),
    Rule("evict", "evict N", "evict at least N pages", _evict, None, "write"),
    Rule(
        "abort",
        "abort room N [REASON]",
        "give up every part of a room here",
        _abort,
        lambda context: [
            "room",
            *(one.replace(":", " ", 1) for one in context.refs if one.startswith("room:")),
        ],
        "write",
    ),
    Rule("fence", "fence", "restart the transfer process", _nothing(Ask(Fence(0))), None, "write"),
    Rule("audit", "audit", "check every invariant now", _nothing(Ask(Audit(0)))),
    Rule("record", "record save", "save the flight recorder", _record, lambda _: ("save",)),
    Rule("q", "q", "quit", _nothing(Quit())),
    Rule("quit", "quit", "quit", _nothing(Quit())),
)
