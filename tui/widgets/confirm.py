"""The question before something is changed, with what the daemon says that it would do."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding
from typing_extensions import override

from kvd.errors import Refusal
from kvd.text import clean, counted
from kvd.wire.admin import Recorded, Report
from tui.draw.spans import Line, Span
from tui.widgets.popup import Popup, broken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.binding import BindingType

    from tui.draw.spans import Style


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
        (Span(f"{count:>12}  ", "selected"), Span(_named(name, count)))
        for name, count in answer.changed.items()
    ]
    if not made:
        made.append((Span("nothing", "dim"),))
    if answer.notes:
        made += [(), (Span("which means", "dim"),)]
        for one in answer.notes:
            made += _broken(f"- {one}", width, "plain")
    if answer.refused:
        made += [(), (Span("refused, or in the way", "warn"),)]
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
    return [(Span(part, style),) for part in broken(clean(text), width)]


class Confirm(Popup[bool]):
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
            return [(Span(first, "warn"),), (), *report_lines(self._would, width)]
        return [
            (Span("What would come of it now:", "plain"),),
            (),
            *report_lines(self._would, width),
        ]

    @override
    def last(self) -> Line:
        if isinstance(self._would, Refusal):
            return (Span("Esc", "key"), Span(" closes"))
        return (
            Span("y", "key"),
            Span(" does it   ", "warn"),
            Span("n Esc", "key"),
            Span(" leaves everything as it is"),
        )

    def action_agree(self) -> None:
        """Do it."""
        if isinstance(self._would, Report):
            self.dismiss(result=True)


class Outcome(Popup[None]):
    """What came of it."""

    def __init__(self, what: str, answer: Report | Recorded | Refusal) -> None:
        super().__init__(what)
        self._answer = answer

    @override
    def body(self, width: int) -> Sequence[Line]:
        return report_lines(self._answer, width)
