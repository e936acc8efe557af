"""Lines over everything: help, menus and questions are made of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar, TypeVar

from textual.binding import Binding
from textual.screen import ModalScreen
from typing_extensions import override

from kvd.errors import Refusal
from kvd.text import clean, counted
from kvd.wire.admin import Recorded, Report
from tui.draw import spans
from tui.draw.spans import Line, Styled, cleaned
from tui.keys import TABLE
from tui.model.commands import RULES
from tui.widgets.canvas import Canvas

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from textual.app import ComposeResult
    from textual.binding import BindingType

    from tui.draw.spans import Style
    from tui.keys import Hotkey


Result = TypeVar("Result")

MARGIN = 4
"""Columns and lines of the screen that stay free around it."""

FRAME_LINES = 6
"""The border, the heading and the last line, each with a blank one."""


def wrap_words(text: str, width: int) -> list[str]:
    """``text`` in lines of at most ``width`` columns, at blanks where there are any."""
    made, line = [], ""
    for word in text.split(" "):
        rest = word
        while True:
            joined = f"{line} {rest}" if line else rest
            if spans.columns(joined) <= width:
                line = joined
                break
            if line:
                made.append(line)
                line = ""
                continue
            made.append(rest[: max(1, width)])
            rest = rest[max(1, width) :]
    return [*made, line] if line else made


class Dialog(ModalScreen[Result], inherit_bindings=False):
    """Shows ``body``, as wide and high as it is, and scrolls what does not fit."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "leave", show=False),
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "move(-10)", show=False),
        Binding("pagedown", "move(10)", show=False),
    ]
    AUTO_FOCUS = None
    DEFAULT_CSS = """
    Dialog { align: center middle; background: $background 60%; }
    Dialog > Canvas { background: $surface; border: round $primary; padding: 0 1; }
    """

    def __init__(self, title: str, columns: int = 72) -> None:
        super().__init__()
        self._heading = title
        self._columns = columns
        self._top = 0

    def body(self, width: int) -> Sequence[Line]:
        """Every line, in at most this many columns."""
        raise NotImplementedError

    def last(self) -> Line:
        """What keys do here; always to be seen."""
        return (Styled("Esc", "key"), Styled(" closes"))

    @override
    def compose(self) -> ComposeResult:
        yield Canvas()

    def on_mount(self) -> None:
        """Show it, and nothing over it: what was said in passing is over."""
        self.app.clear_notifications()
        self.redraw()

    def on_resize(self) -> None:
        """Fit it to the terminal."""
        self.redraw()

    def redraw(self) -> None:
        """Make every line anew."""
        width = max(20, min(self._columns, self.app.size.width - MARGIN))
        lines = list(self.body(width))
        room = max(3, self.app.size.height - MARGIN - FRAME_LINES)
        self._top = max(0, min(self._top, len(lines) - room))
        shown = lines[self._top : self._top + room]
        more = len(lines) - len(shown) - self._top
        tail = (
            (*self.last(), Styled(f"   {counted(more, 'line')} more", "dim"))
            if more
            else self.last()
        )
        canvas = self.query_one(Canvas)
        canvas.styles.width = width + 4
        canvas.styles.height = len(shown) + FRAME_LINES
        head: Line = (cleaned(self._heading, "head"),)
        canvas.paint([head, (), *shown, (), spans.fit(tail, width)])

    def action_move(self, rows: int) -> None:
        """Scroll."""
        self._top += rows
        self.redraw()

    def action_leave(self) -> None:
        """Close it, and choose nothing."""
        self.dismiss(None)


def report_lines(answer: Report | Recorded | Refusal, width: int) -> list[Line]:
    """What was or would be changed, and what was or would be refused, each with its reason."""
    match answer:
        case Refusal(message=message):
            return _broken(message, width, "bad")
        case Recorded() as done:
            inputs = counted(done.inputs, "input")
            text = f"{done.path} on the daemon's host: {done.seconds:.1f} s, {inputs}"
            return _broken(text, width, "ok")
        case Report():
            pass
    made: list[Line] = [
        (Styled(f"{count:>12}  ", "selected"), Styled(_named(name, count)))
        for name, count in answer.changed.items()
    ]
    if not made:
        made.append((Styled("nothing", "dim"),))
    if answer.notes:
        made += [(), (Styled("which means", "dim"),)]
        for one in answer.notes:
            made += _broken(f"- {one}", width, "plain")
    if answer.refused:
        made += [(), (Styled("refused, or in the way", "warn"),)]
        for one in answer.refused:
            made += _broken(f"! {one}", width, "plain")
    if answer.standing is not None:
        text = f"standing audit: {counted(answer.standing.findings, 'finding')} now"
        made += [(), *_broken(text, width, "bad" if answer.standing.findings else "ok")]
    return made


def _named(name: str, count: int) -> str:
    """A figure of a report as words: ``freed pages``, and ``freed page`` where it is one."""
    words = clean(name.replace("_", " "))
    return re.sub(r"s\b", "", words) if count == 1 else words


def _broken(text: str, width: int, style: Style) -> list[Line]:
    return [(Styled(part, style),) for part in wrap_words(clean(text), width)]


class ConfirmDialog(Dialog[bool]):
    """Ends with True only if ``y`` was pressed, which means something only where it can be done."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "agree", show=False),
        Binding("n", "leave", show=False),
    ]

    def __init__(self, what: str, would: Report | Refusal) -> None:
        super().__init__(what)
        self._would = would

    @override
    def body(self, width: int) -> Sequence[Line]:
        if isinstance(self._would, Refusal):
            first = "The daemon does not say what this would do, so it is not done:"
            return [(Styled(first, "warn"),), (), *report_lines(self._would, width)]
        return [
            (Styled("What would come of it now:", "plain"),),
            (),
            *report_lines(self._would, width),
        ]

    @override
    def last(self) -> Line:
        if isinstance(self._would, Refusal):
            return (Styled("Esc", "key"), Styled(" closes"))
        return (
            Styled("y", "key"),
            Styled(" does it   ", "warn"),
            Styled("n Esc", "key"),
            Styled(" leaves everything as it is"),
        )

    def action_agree(self) -> None:
        """Do it."""
        if isinstance(self._would, Report):
            self.dismiss(result=True)


class OutcomeDialog(Dialog[None]):
    """What came of it."""

    def __init__(self, what: str, answer: Report | Recorded | Refusal) -> None:
        super().__init__(what)
        self._answer = answer

    @override
    def body(self, width: int) -> Sequence[Line]:
        return report_lines(self._answer, width)


class MenuDialog(Dialog[str]):
    """Ends with what was chosen, or with None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "choose", show=False),
        *(Binding(str(at), f"pick({at - 1})", show=False) for at in range(1, 10)),
    ]

    def __init__(self, title: str, choices: Sequence[str]) -> None:
        super().__init__(title, 48)
        self._choices = tuple(choices)
        self._at = 0

    @override
    def body(self, width: int) -> Sequence[Line]:
        if not self._choices:
            return [(Styled("nothing has to do with it", "dim"),)]
        made: list[Line] = []
        for at, choice in enumerate(self._choices):
            is_chosen = at == self._at
            number = f"{at + 1} " if at < 9 else "  "
            mark = "▸ " if is_chosen else "  "
            made.append((Styled(mark, "key"), Styled(number, "key"), cleaned(choice)))
            if is_chosen:
                made[-1] = tuple(span._replace(under="cursor") for span in made[-1])
        return made

    @override
    def last(self) -> Line:
        return (
            Styled("Enter", "key"),
            Styled(" goes there   "),
            Styled("Esc", "key"),
            Styled(" stays"),
        )

    @override
    def action_move(self, rows: int) -> None:
        self._at = max(0, min(len(self._choices) - 1, self._at + rows))
        self._top = max(0, self._at - 5)
        self.redraw()

    def action_choose(self) -> None:
        """Go to what is marked."""
        self.action_pick(self._at)

    def action_pick(self, at: int) -> None:
        """Go to this one."""
        if at < len(self._choices):
            self.dismiss(self._choices[at])


GROUPS = {
    "pages": "pages",
    "move": "moving",
    "open": "what is open",
    "view": "what the page shows",
    "time": "time",
    "change": "changes something: shows first what it would do",
    "console": "the console",
}
"""Groups of the table, and how they are headed; a page's own keys come before them."""
KEY_COLUMNS = 12
COMMAND_COLUMNS = 30


def help_lines(page: str, has: Collection[str], width: int) -> list[Line]:
    """The keys of this page, then those of all, then commands; what means nothing now is dim."""
    own = [key for key in TABLE if page in key.pages]
    made: list[Line] = []
    if own:
        made += _group(f"on the page {page}", own, page, has)
    for group, heading in GROUPS.items():
        keys = [key for key in TABLE if key.group == group and not key.pages]
        made += _group(heading, [key for key in keys if key not in own], page, has)
    made += [(Styled("commands", "head"),)]
    for rule in RULES:
        if rule.needs and rule.needs not in has:
            continue
        usage = spans.left(f":{rule.usage}", COMMAND_COLUMNS)
        made.append((Styled(f"  {usage} ", "key"), Styled(rule.help)))
    return [spans.fit(line, width) if spans.width_of(line) > width else line for line in made]


def _group(heading: str, keys: Sequence[Hotkey], page: str, has: Collection[str]) -> list[Line]:
    """Keys that change something are left out where nothing may be changed."""
    shown = [key for key in keys if "write" not in key.needs or "write" in has]
    if not shown:
        return []
    made: list[Line] = [(Styled(heading, "head"),)]
    for key in shown:
        style: spans.Style = "plain" if key.means(page, has) else "dim"
        label = spans.left(key.label, KEY_COLUMNS)
        made.append((Styled(f"  {label} ", "key"), Styled(key.help, style)))
    return [*made, ()]


class HelpDialog(Dialog[None]):
    """Every key, by what it is about."""

    def __init__(self, page: str, has: Collection[str]) -> None:
        super().__init__("keys and commands", 92)
        self._page = page
        self._has = frozenset(has)

    @override
    def body(self, width: int) -> Sequence[Line]:
        return help_lines(self._page, self._has, width)
