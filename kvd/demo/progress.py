"""How the demo shows what it is doing: a bar on a terminal, plain lines anywhere else.

Both write to the standard error; the standard output is for the result alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console

    from kvd.demo.report import Row


def told(row: Row) -> str:
    """One turn in a line."""
    tokens = "tokens equal" if row.tokens_equal else "TOKENS DIFFER"
    return (
        f"{row.conversation} turn {row.turn}: {row.prompt_tokens} tokens, "
        f"{row.decode_prefix_len} cached on the decode node, {row.sent_told}, "
        f"first token after {row.ttft_ms:.0f} ms, {tokens}"
    )


class Lines:
    """Progress as plain lines."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def stage(self, what: str) -> None:
        """``what`` begins."""
        click.echo(what, err=True)

    def turn(self, row: Row, _turns: int) -> None:
        """One turn is over."""
        click.echo(f"  {told(row)}", err=True)


class Bar:
    """Progress as one bar with what is going on, and a line above it for each turn."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def stage(self, what: str) -> None:
        """``what`` begins."""
        self._progress.update(self._task, description=what)

    def turn(self, row: Row, turns: int) -> None:
        """One of ``turns`` turns is over."""
        self._progress.console.print(told(row), highlight=False)
        self._progress.update(self._task, total=turns, advance=1)
