"""A menu of what one can go to."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding
from typing_extensions import override

from tui.draw.spans import Line, Span, said
from tui.widgets.popup import Popup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.binding import BindingType


class Menu(Popup[str]):
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
            return [(Span("nothing has to do with it", "dim"),)]
        made: list[Line] = []
        for at, choice in enumerate(self._choices):
            is_chosen = at == self._at
            number = f"{at + 1} " if at < 9 else "  "
            mark = "▸ " if is_chosen else "  "
            made.append((Span(mark, "key"), Span(number, "key"), said(choice)))
            if is_chosen:
                made[-1] = tuple(span._replace(under="cursor") for span in made[-1])
        return made

    @override
    def last(self) -> Line:
        return (Span("Enter", "key"), Span(" goes there   "), Span("Esc", "key"), Span(" stays"))

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
