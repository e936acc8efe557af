"""The line in which an operator types a command or a filter, and the line above it that helps."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding
from textual.containers import Container
from textual.message import Message
from textual.widgets import Input
from typing_extensions import override

from tui.draw import spans
from tui.draw.spans import Line, Styled, cleaned
from tui.model import commands
from tui.widgets.canvas import Canvas, console

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.app import ComposeResult
    from textual.binding import BindingType

    from kvd.filters import SyntaxFlaw

MAX_HISTORY = 50


class CommandBar(Container):
    """Hidden until ``ask``; then all keys go here until Enter or Esc.

    ``mode`` is ``:`` or ``/``. ``judge`` says what is wrong with a text of this mode, or None.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "complete", "complete"),
        Binding("up", "recall(1)", "older"),
        Binding("down", "recall(-1)", "newer"),
        Binding("escape", "leave", "leave"),
    ]
    DEFAULT_CSS = """
    CommandBar { height: 2; display: none; background: $panel; }
    CommandBar > Canvas { height: 1; }
    CommandBar > Input { height: 1; border: none; padding: 0; background: $panel; }
    """

    class Entered(Message):
        """Enter was pressed on a text without a flaw."""

        def __init__(self, mode: str, text: str) -> None:
            super().__init__()
            self.mode = mode
            self.text = text

    def __init__(self, judge: Callable[[str, str], SyntaxFlaw | None]) -> None:
        super().__init__(id="bar")
        self._judge = judge
        self._choose_from: Callable[[], commands.CommandChoices] = commands.CommandChoices
        self.mode = ":"
        self.is_entering = False
        """Enter was pressed, and what was typed is not looked at yet: later keys wait for that."""
        self._past: dict[str, deque[str]] = {mode: deque(maxlen=MAX_HISTORY) for mode in (":", "/")}
        self._at = 0

    @override
    def compose(self) -> ComposeResult:
        yield Canvas()
        yield Input(compact=True, select_on_focus=False)

    @property
    def typed(self) -> Input:
        """Where the text is."""
        return self.query_one(Input)

    def ask(self, mode: str, text: str, choices: Callable[[], commands.CommandChoices]) -> None:
        """Have the operator type; ``choices`` says what there is to choose from."""
        self.mode, self._choose_from, self._at = mode, choices, 0
        self.app.clear_notifications()
        self.display = True
        self._put(text)
        # At once, not with the next message: the next key may be here already.
        self.screen.set_focus(self.typed)
        self.redraw()

    def action_leave(self) -> None:
        """Hide, and give the keys back."""
        self.display = False
        self.screen.set_focus(console(self).page)

    @property
    def text(self) -> str:
        """What was typed, without the mode."""
        return self.typed.value.removeprefix(self.mode)

    def redraw(self) -> None:
        """Say what may follow, or where the flaw is."""
        self.query_one(Canvas).paint([self._help()])

    def _help(self) -> Line:
        found = self._choices()
        flaw = self._judge(self.mode, self.text) if self.text else None
        if flaw is not None and not found:
            return said_at(flaw, self.app.size.width)
        line = [Styled("Tab ", "key")] if found else []
        for choice in found:
            line += [cleaned(choice.rpartition(" ")[2] or choice), Styled("  ")]
        return spans.ruled(tuple(line), (), self.app.size.width, is_lit=True)

    def _choices(self) -> list[str]:
        if self.mode == ":":
            return commands.complete(self.text, self._choose_from())
        head, _, word = self.text.rpartition(" ")
        names = [f"{name}:" for name in self._choose_from().columns if name.startswith(word)]
        return [f"{head} {name}".lstrip() for name in names if word != name]

    def action_complete(self) -> None:
        """As much as all choices have in common; the first one where that is nothing more."""
        found = self._choices()
        if not found:
            return
        common = found[0]
        while not all(choice.startswith(common) for choice in found):
            common = common[:-1]
        text = common if len(common) > len(self.text) else found[0]
        self._put(text if len(found) > 1 or text.endswith(":") else f"{text} ")

    def action_recall(self, steps: int) -> None:
        """Go through what was typed before."""
        past = self._past[self.mode]
        self._at = max(0, min(self._at + steps, len(past)))
        self._put(past[-self._at] if self._at else "")

    def _put(self, text: str) -> None:
        self.typed.value = self.mode + text
        self.typed.cursor_position = len(self.typed.value)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Help with what is there now; without its first character there is nothing to type in."""
        event.stop()
        if self.display and not event.value.startswith(self.mode):
            self.action_leave()
        self.redraw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Hand it over, unless there is a flaw in it."""
        event.stop()
        text = self.text.strip()
        flaw = self._judge(self.mode, self.text) if text else None
        if flaw is not None:
            self.is_entering = False
            self.query_one(Canvas).paint([said_at(flaw, self.app.size.width)])
            return
        if text and (not self._past[self.mode] or self._past[self.mode][-1] != text):
            self._past[self.mode].append(text)
        mode = self.mode
        self.action_leave()
        self.post_message(self.Entered(mode, text))


def said_at(flaw: SyntaxFlaw, width: int) -> Line:
    """The flaw, with a mark over the character where it is."""
    at = flaw.at + 1
    if at + 2 + spans.columns(flaw.what) <= width:
        return (Styled(" " * at), Styled("v ", "bad"), cleaned(flaw.what, "bad"))
    return spans.fit((cleaned(flaw.what, "bad"), Styled(f" (at {flaw.at + 1})", "dim")), width)
