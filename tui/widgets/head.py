"""Around a page: how the daemon is and how old that is, what happened last, and the keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import msgspec
from textual.widgets import Footer
from textual.widgets._footer import FooterKey
from typing_extensions import override

from kvd.text import duration
from kvd.wire.console import EventQuery
from tui.draw import spans
from tui.draw.spans import Line, Styled, cleaned
from tui.model import event_words
from tui.model.event_log import EventGap, LogEntries, line_of
from tui.model.mirror import LinkConnecting, LinkDown, LinkLagging, LinkLive, LinkState
from tui.widgets.canvas import Canvas, console

if TYPE_CHECKING:
    from textual import events
    from textual.app import ComposeResult

    from kvd.wire.console import Vitals
    from tui.draw.spans import Style
    from tui.model.event_log import Entry
    from tui.model.snapshots import DaemonSnapshot


class HeadStatus(msgspec.Struct, frozen=True):
    """What the head says beside the vitals. ``frozen_s``: how far back the picture lies, or None.

    ``now_s`` is on our clock.
    """

    link_state: LinkState
    now_s: float
    fps: float
    frozen_s: float | None = None
    clock: str = ""
    """The time of day of what is shown."""


HEALTH: dict[str, tuple[str, Style]] = {
    "high": ("BAD", "bad"),
    "medium": ("LOOK", "warn"),
    "low": ("FAIR", "warn"),
    "": ("GOOD", "ok"),
}
"""The gravest finding, as one word."""

LAG_S = 0.05
"""A loop that is later than this is worth a colour."""


def head_line(vitals: Vitals | None, now: HeadStatus, width: int) -> Line:
    """How the daemon is and how old that is; what matters least goes first where room is short."""
    at_right = _picture(now)
    parts = _parts(vitals, now) if vitals is not None else []
    room = width - spans.width_of(at_right) - 1
    while parts and sum(spans.columns(part.text) + 2 for part in parts) > room:
        parts.pop()
    at_left = [span for part in parts for span in (Styled("  "), part)]
    return spans.spread(spans.merged((Styled(" "), *at_left[1:])), (*at_right, Styled(" ")), width)


def _parts(vitals: Vitals, now: HeadStatus) -> list[Styled]:
    """What is said, the most important first."""
    word, style = HEALTH.get(vitals.worst, ("LOOK", "warn"))
    up_s = max(0.0, vitals.at_s - vitals.started_s)
    is_missing = vitals.peers_up < vitals.peers
    if isinstance(now.link_state, LinkDown):
        word, style = "LOST", "bad"
    made = [
        Styled(word, style),
        cleaned(vitals.node, "head"),
        cleaned(vitals.state, "ok" if vitals.state == "serving" else "warn"),
    ]
    if vitals.findings:
        made.append(Styled(f"problems {vitals.findings}", style))
    if vitals.waiting:
        made.append(Styled(f"waiting {vitals.waiting}", "warn"))
    made += [
        Styled(f"peers {vitals.peers_up}/{vitals.peers}", "warn" if is_missing else "plain"),
        Styled(f"engines {vitals.clients}"),
        Styled(f"lag {vitals.lag_s * 1000:.1f}ms", "warn" if vitals.lag_s > LAG_S else "dim"),
        Styled(f"up {duration(up_s) if up_s >= 60 else f'{up_s:.0f}s'}", "dim"),
        cleaned(f"gen {vitals.generation}", "dim"),
        cleaned(f"kvd {vitals.version}", "dim"),
        cleaned(vitals.unit, "dim"),
    ]
    return [part for part in made if part.text]


def _picture(now: HeadStatus) -> Line:
    """How old what one sees is, and why."""
    match now.link_state:
        case LinkDown(why, since_s):
            ago = duration(max(0.0, now.now_s - since_s))
            text = f"NOT REACHABLE {ago}: {why}"
            link: Line = (cleaned(text, "bad"),)
        case LinkConnecting(why):
            link = (cleaned(f"CONNECTING {why}".rstrip(), "warn"),)
        case LinkLagging(lag_s):
            link = (Styled(f"LAGGING {duration(lag_s)}", "warn"),)
        case LinkLive():
            link = ()
        case _:
            assert_never(now.link_state)
    if now.frozen_s is not None:
        frozen = Styled(f"FROZEN -{now.frozen_s:.1f}s {now.clock}", "warn")
        return spans.merged((frozen, Styled(" "), *link) if link else (frozen,))
    if link:
        return link
    return (Styled(f"LIVE {now.fps:.2g}/s", "ok"), Styled(f" {now.clock}" if now.clock else ""))


class Foot(Footer):
    """The last line: keys, as many as there is room for; how to get help and to leave are there."""

    @override
    def compose(self) -> ComposeResult:
        keys = [key for key in super().compose() if isinstance(key, FooterKey)]
        widths = [spans.columns(f"{key.key_display} {key.description} ") for key in keys]
        while len(keys) > 2 and sum(widths) > self.app.size.width + 1:
            del keys[-3], widths[-3]
        yield from keys

    def on_resize(self) -> None:
        """There may be room for others."""
        self.refresh(recompose=True)

    @override
    async def recompose(self) -> None:
        await super().recompose()
        # Textual lets go of the keys of before only when what they watch is said to have changed.
        self.mutate_reactive(Footer.compact)


# ---- what happened ------------------------------------------------------------------------------

HAPPENED = EventQuery(0, limit=100, kinds=event_words.CHANGES)
TALL_LINES = 44
"""A terminal with fewer has no room for it beside what a page is for."""


class Happened(Canvas):
    """Failures and changes of the node, the newest on top; a click opens one."""

    def __init__(self) -> None:
        super().__init__(id="happened")
        self._book = LogEntries()
        self._shown: list[Entry] = []

    def show(self, snapshot: DaemonSnapshot) -> None:
        """Paint what there is."""
        log, (width, height) = snapshot.log(HAPPENED), self.size
        found = self._book.entries(log, snapshot.now_s)
        found = [entry for entry in found if not isinstance(entry.item, EventGap)]
        self._shown = found[: -max(height, 1) : -1]
        title = (Styled("what happened", "head"), Styled(" failures and changes", "dim"))
        lines = [self._line(entry, width) for entry in self._shown]
        none = spans.line("  nothing yet", "dim")
        self.paint([spans.headed(title, width), *(lines or [none])])

    def _line(self, entry: Entry, width: int) -> Line:
        when = Styled(f"  {console(self).time_of_day(entry.at_s)} ", "dim")
        return spans.fit((when, *line_of(entry).spans), width)

    async def on_click(self, event: events.Click) -> None:
        """The event of this line."""
        if 0 < event.y <= len(self._shown):
            await console(self).open(self._shown[event.y - 1].ref)
