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
from tui.widgets.canvas import Canvas

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.app import ComposeResult
    from textual.binding import BindingType

    from kvd.filters import SyntaxFlaw

MAX_HISTORY = 50


class CommandInput(Input):
    """An input whose Tab completes and whose arrows go through what was typed before."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "screen_bar('complete')", show=False),
        Binding("up", "screen_bar('older')", show=False),
        Binding("down", "screen_bar('newer')", show=False),
        Binding("escape", "screen_bar('leave')", show=False),
    ]

    def action_screen_bar(self, what: str) -> None:
        """Have the bar do it."""
        bar = self.parent
        assert isinstance(bar, CommandBar)
        bar.do(what)


class CommandBar(Container):
    """Hidden until ``ask``; then all keys go here until Enter or Esc.

    ``mode`` is ``:`` or ``/``. ``judge`` says what is wrong with a text of this mode, or None.
    """

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
        self._past: dict[str, deque[str]] = {mode: deque(maxlen=MAX_HISTORY) for mode in (":", "/")}
        self._at = 0

    @override
    def compose(self) -> ComposeResult:
        yield Canvas()
        yield CommandInput(compact=True, select_on_focus=False)

    @property
    def typed(self) -> Input:
        """Where the text is."""
        return self.query_one(CommandInput)

    def ask(self, mode: str, text: str, choices: Callable[[], commands.CommandChoices]) -> None:
        """Have the operator type; ``choices`` says what there is to choose from."""
        self.mode, self._choose_from, self._at = mode, choices, 0
        self.app.clear_notifications()
        self.display = True
        self.typed.value = mode + text
        self.typed.cursor_position = len(self.typed.value)
        self.typed.focus()
        self.redraw()

    def leave(self) -> None:
        """Hide, and give the keys back."""
        self.display = False
        self.screen.set_focus(None)

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
            return said_at(flaw, self.size.width)
        line = [Styled("Tab ", "key")] if found else []
        for choice in found:
            line += [cleaned(choice.rpartition(" ")[2] or choice), Styled("  ")]
        return spans.fit(line, self.size.width)

    def _choices(self) -> list[str]:
        if self.mode == ":":
            return commands.complete(self.text, self._choose_from())
        head, _, word = self.text.rpartition(" ")
        names = [f"{name}:" for name in self._choose_from().columns if name.startswith(word)]
        return [f"{head} {name}".lstrip() for name in names if word != name]

    def do(self, what: str) -> None:
        """Complete, go through what was typed before, or leave."""
        match what:
            case "complete":
                self._complete()
            case "older":
                self._recall(self._at + 1)
            case "newer":
                self._recall(self._at - 1)
            case _:
                self.leave()

    def _complete(self) -> None:
        """As much as all choices have in common; the first one where that is nothing more."""
        found = self._choices()
        if not found:
            return
        common = found[0]
        for one in found[1:]:
            while not one.startswith(common):
                common = common[:-1]
        text = common if len(common) > len(self.text) else found[0]
        self._put(text if len(found) > 1 or text.endswith(":") else f"{text} ")

    def _recall(self, at: int) -> None:
        past = self._past[self.mode]
        self._at = max(0, min(at, len(past)))
        self._put(past[-self._at] if self._at else "")

    def _put(self, text: str) -> None:
        self.typed.value = self.mode + text
        self.typed.cursor_position = len(self.typed.value)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Help with what is there now; without its first character there is nothing to type in."""
        event.stop()
        if self.display and not event.value.startswith(self.mode):
            self.leave()
        self.redraw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Hand it over, unless there is a flaw in it."""
        event.stop()
        text = self.text.strip()
        flaw = self._judge(self.mode, self.text) if text else None
        if flaw is not None:
            self.query_one(Canvas).paint([said_at(flaw, self.size.width)])
            return
        if text and (not self._past[self.mode] or self._past[self.mode][-1] != text):
            self._past[self.mode].append(text)
        mode = self.mode
        self.leave()
        self.post_message(self.Entered(mode, text))


def said_at(flaw: SyntaxFlaw, width: int) -> Line:
    """The flaw, with a mark over the character where it is."""
    at = flaw.at + 1
    if at + 2 + spans.columns(flaw.what) <= width:
        return (Styled(" " * at), Styled("v ", "bad"), cleaned(flaw.what, "bad"))
    return spans.fit((cleaned(flaw.what, "bad"), Styled(f" (at {flaw.at + 1})", "dim")), width)
