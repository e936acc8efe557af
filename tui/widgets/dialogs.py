"""What lies over everything: questions, what came of them, and menus."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, OptionList, Static
from typing_extensions import override

from kvd.errors import Refusal
from kvd.text import clean, counted
from kvd.wire.admin import Recorded, Report
from tui.draw.spans import EMPTY, Styled, cleaned, line
from tui.widgets.canvas import palette_of, rich_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Group
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from tui.draw.spans import Line


def report_lines(answer: Report | Recorded | Refusal) -> list[Line]:
    """What was or would be changed, and what was or would be refused, each with its reason."""
    match answer:
        case Refusal(message=message):
            return [(cleaned(message, "bad"),)]
        case Recorded() as done:
            inputs = counted(done.inputs, "input")
            text = f"{done.path} on the daemon's host: {done.seconds:.1f} s, {inputs}"
            return [(cleaned(text, "ok"),)]
        case Report():
            pass
    made: list[Line] = [
        (Styled(f"{count:>12}  ", "selected"), Styled(_named(name, count)))
        for name, count in answer.changed.items()
    ]
    made = made or [line("nothing", "dim")]
    if answer.notes:
        made += [EMPTY, line("which means", "dim")]
        made += [(cleaned(f"- {note}"),) for note in answer.notes]
    if answer.refused:
        made += [EMPTY, line("refused, or in the way", "warn")]
        made += [(cleaned(f"! {refusal}"),) for refusal in answer.refused]
    if answer.standing is not None:
        text = f"standing audit: {counted(answer.standing.findings, 'finding')} now"
        made += [EMPTY, line(text, "bad" if answer.standing.findings else "ok")]
    return made


def _named(name: str, count: int) -> str:
    """A figure of a report as words: ``freed pages``, and ``freed page`` where it is one."""
    words = clean(name.replace("_", " "))
    return re.sub(r"s\b", "", words) if count == 1 else words


class ReportDialog(ModalScreen[bool]):
    """What came of something; as a question what would, and True only if that is agreed to."""

    AUTO_FOCUS = "VerticalScroll"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,n", "leave", "leave everything as it is"),
        Binding("y", "agree", "do it"),
    ]

    def __init__(
        self, title: str, answer: Report | Recorded | Refusal, *, is_question: bool = False
    ) -> None:
        super().__init__(classes="dialog")
        self._heading = title
        self._answer = answer
        self._is_question = is_question
        self._can_agree = is_question and isinstance(answer, Report)

    @override
    def compose(self) -> ComposeResult:
        box = Vertical()
        box.border_title = Content(clean(self._heading))
        with box:
            with VerticalScroll():
                yield Static(self._body())
            with Horizontal():
                if self._can_agree:
                    yield Button("y  do it", id="agree", compact=True)
                    yield Button("n Esc  leave everything as it is", id="leave", compact=True)
                else:
                    yield Button("Esc  close", id="leave", compact=True)

    def _body(self) -> Group:
        lines = report_lines(self._answer)
        if self._can_agree:
            lines = [line("What would come of it now:"), EMPTY, *lines]
        elif self._is_question:
            why = "The daemon does not say what this would do, so it is not done:"
            lines = [line(why, "warn"), EMPTY, *lines]
        return rich_lines(lines, palette_of(self.app))

    def on_mount(self) -> None:
        """What was said in passing is over."""
        self.app.clear_notifications()

    @override
    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "agree" or self._can_agree

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """One of the buttons was clicked."""
        self.dismiss(event.button.id == "agree")

    def action_agree(self) -> None:
        """Have done what was rehearsed."""
        self.dismiss(result=True)

    def action_leave(self) -> None:
        """Do nothing."""
        self.dismiss(result=False)


class NumberedOptions(OptionList):
    """Things to go to, by their numbers too."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k", "cursor_up", show=False),
        Binding("j", "cursor_down", show=False),
        *(Binding(str(at), f"pick({at - 1})", show=False) for at in range(1, 10)),
    ]

    def action_pick(self, at: int) -> None:
        """Go to this one."""
        if at < self.option_count:
            self.highlighted = at
            self.action_select()


class MenuDialog(ModalScreen[str]):
    """Ends with what was chosen, or with None."""

    AUTO_FOCUS = "NumberedOptions"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "stay")]

    def __init__(self, title: str, choices: Sequence[str]) -> None:
        super().__init__(classes="dialog")
        self._heading = title
        self._choices = tuple(choices)

    @override
    def compose(self) -> ComposeResult:
        box = Vertical()
        box.border_title = Content(clean(self._heading))
        with box:
            if not self._choices:
                yield Static("nothing has to do with it")
            names = [clean(choice) for choice in self._choices]
            yield NumberedOptions(
                *(f"{at} {name}" for at, name in enumerate(names, start=1)), markup=False
            )

    def on_mount(self) -> None:
        """Enter goes to the first, unless another is chosen."""
        self.query_one(NumberedOptions).action_first()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Go to what was chosen."""
        self.dismiss(self._choices[event.option_index])
