"""``kvd demo``: the command line of the demo, and how its progress is shown.

Importing this loads neither torch nor transformers; the engines do, in their own processes.
Progress is a bar on a terminal, plain lines anywhere else; both go to the standard error, for the
standard output is for the result alone.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self

import click
import msgspec
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvd.core.layout.page_sizes import window_flaw
from kvd.demo import embedding
from kvd.demo.division import ALONE, Division, DivisionWay, need_divisible
from kvd.demo.models import ARCHITECTURES, DTYPES, ENCODERS, PAGE_SIZE
from kvd.demo.processes import DemoFailed
from kvd.demo.report import DemoReport, controls_told, legend_of, table_of, verdict
from kvd.demo.runner import run
from kvd.demo.settings import MOST_TURNS, DemoSettings

if TYPE_CHECKING:
    from types import TracebackType

    from kvd.demo.embedding import EmbeddingReport
    from kvd.demo.report import TurnRow


def told(row: TurnRow) -> str:
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

    def turn(self, row: TurnRow, _turns: int) -> None:
        """One turn is over."""
        click.echo(f"  {told(row)}", err=True)


class Bar:
    """Progress as one bar with what is going on, and a line above it for each turn."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True)
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

    def turn(self, row: TurnRow, turns: int) -> None:
        """One of ``turns`` turns is over."""
        self._progress.console.print(told(row), highlight=False)
        self._progress.update(self._task, total=turns, advance=1)


PARTS = ("torch", "transformers")
TABLE_COLUMNS = 110
"""Width of the table where no terminal says how wide it may be."""

MOST_RANKS = 8
RANKS = click.IntRange(2, MOST_RANKS)


@click.command()
@click.option(
    "--model",
    type=click.Choice(sorted([*ARCHITECTURES, *ENCODERS])),
    default="llama",
    show_default=True,
    help="Architecture, from Hugging Face transformers; the weights are random.",
)
@click.option(
    "--turns",
    type=click.IntRange(1, MOST_TURNS),
    default=5,
    show_default=True,
    help="Turns of the first conversation; a second one and a repetition follow.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="Write what was measured to this file.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Of weights and prompts.")
@click.option(
    "--page-size",
    type=click.IntRange(1, 256),
    default=None,
    help=f"Tokens per page; {PAGE_SIZE} if left out.",
)
@click.option(
    "--layout",
    "order",
    type=click.Choice(["page_first", "layer_first"]),
    default="page_first",
    show_default=True,
    help="Order of the pools in memory.",
)
@click.option(
    "--dtype", type=click.Choice(DTYPES), default="float32", show_default=True, help="Of the KV."
)
@click.option(
    "--tp",
    metavar="P:D",
    help="Tensor parallel: so many ranks of the prefill and of the decode engine, e.g. 1:2.",
)
@click.option("--cp", type=RANKS, help="Context parallel: so many ranks prefill, a daemon each.")
@click.option("--pp", type=RANKS, help="Pipeline: so many stages prefill, a daemon each.")
@click.pass_context
def demo_command(  # noqa: PLR0913 - one parameter for each option
    ctx: click.Context,
    *,
    model: str,
    turns: int,
    json_file: Path | None,
    seed: int,
    page_size: int | None,
    order: str,
    dtype: str,
    tp: str | None,
    cp: int | None,
    pp: int | None,
) -> None:
    """Hand prompts from a prefill node to a decode node, with a real model, on this machine.

    Two daemons, a prefill engine and a decode engine run as processes; KV travels by NIXL, only
    what the decode node lacks. Every answer is compared with that of a single process; at last a
    page is damaged on purpose, which the comparison must notice.

    With --tp, --cp or --pp an engine is several processes that compute together.

    An embedding model decodes nothing, so it has one node: it embeds batches of texts with their KV
    written to a pool and with cache.mode = "prefill-only", which must give the same embeddings.
    """
    _need_parts()
    _need_folder(json_file)
    prefill, decode = _divisions(tp, cp, pp)
    settings = DemoSettings(
        model=model,
        turns=turns,
        seed=seed,
        page_size=page_size,
        order=order,
        dtype=dtype,
        prefill=prefill,
        decode=decode,
    )
    _need_sense(ctx, settings)
    _need_ranks(settings)
    signal.signal(signal.SIGTERM, _end)  # so that the processes are stopped then too
    report = _perform(settings)
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    _show(report)
    ctx.exit(0 if report.ok else 1)


def _divisions(tp: str | None, cp: int | None, pp: int | None) -> tuple[Division, Division]:
    """What the prefill and the decode engine are to be."""
    ranks = _rank_pair(tp)
    ways = [
        (DivisionWay.TENSOR, ranks[0]),
        (DivisionWay.CONTEXT, cp or 1),
        (DivisionWay.PIPELINE, pp or 1),
    ]
    asked = [Division(way, count) for way, count in ways if count > 1]
    if len(asked) > 1:
        told = " and ".join(one.told for one in asked)
        raise click.UsageError(f"a prefill engine is divided in one way, not by {told}")
    decode = Division(DivisionWay.TENSOR, ranks[1]) if ranks[1] > 1 else ALONE
    return (asked or [ALONE])[0], decode


def _rank_pair(tp: str | None) -> tuple[int, int]:
    """The tensor-parallel ranks of both engines."""
    words = (tp or "1:1").split(":")
    if len(words) == 2 and all(word.isdecimal() for word in words):
        prefill, decode = map(int, words)
        if min(prefill, decode) >= 1 and max(prefill, decode) <= MOST_RANKS:
            return prefill, decode
    raise click.BadParameter(
        f"{tp} is not P:D, the ranks of prefill and decode, each of 1 to {MOST_RANKS}",
        param_hint="--tp",
    )


def _need_ranks(settings: DemoSettings) -> None:
    """Refuse what the model cannot be divided into."""
    for division in (settings.prefill, settings.decode):
        if settings.is_encoder and division != ALONE:
            raise click.UsageError(f"{settings.model} hands no KV over: it is one process")
        try:
            need_divisible(settings.architecture.shape, settings.pool.parts, division)
        except ValueError as reason:
            raise click.UsageError(f"{settings.model} as {division.told}: {reason}") from reason


def _need_sense(ctx: click.Context, settings: DemoSettings) -> None:
    """Refuse options that mean nothing for the model, or that its pool cannot do."""
    if settings.page_size is not None and not settings.architecture.has_token_pages:
        raise click.BadParameter(
            f"{settings.model} keeps no KV of tokens: its pages are single tokens",
            param_hint="--page-size",
        )
    page = settings.page_size
    if page is not None and window_flaw(page) and settings.architecture.shape.window_tokens:
        raise click.BadParameter(
            f"{settings.model} has layers with a window, whose tail begins at the border of a page "
            "of several tokens",
            param_hint="--page-size",
        )
    if settings.is_encoder and ctx.get_parameter_source("turns") is not ParameterSource.DEFAULT:
        raise click.BadParameter(
            f"{settings.model} embeds texts: there is no conversation", param_hint="--turns"
        )


def _need_parts() -> None:
    """Refuse at once where the engines could not even start."""
    missing = [name for name in PARTS if importlib.util.find_spec(name) is None]
    if missing:
        raise click.ClickException(
            f"the demo runs a Hugging Face model, and {' and '.join(missing)} cannot be found "
            "here; install the extra: pip install 'kvd[demo]'"
        )


def _need_folder(json_file: Path | None) -> None:
    """Refuse at once what could not be written at the end."""
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise click.BadParameter(f"{json_file.parent} is no directory", param_hint="--json")


def _end(number: int, _frame: object) -> NoReturn:
    """A signal to end: unwinding stops the processes."""
    sys.exit(128 + number)


def _perform(settings: DemoSettings) -> DemoReport | EmbeddingReport:
    """The demo, with its progress on the standard error."""
    console = Console(stderr=True)
    try:
        with Bar(console) if console.is_terminal else Lines() as watcher:
            if settings.is_encoder:
                return embedding.run(settings, watcher)
            return run(settings, watcher)
    except DemoFailed as failure:
        raise click.ClickException(str(failure)) from failure


def _show(report: DemoReport | EmbeddingReport) -> None:
    """Table and verdict on the standard output."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_COLUMNS)
    if isinstance(report, DemoReport):
        console.print(table_of(report))
        legend, lines, last = legend_of(report), controls_told(report), verdict(report)
    else:
        console.print(embedding.table_of(report))
        legend, lines = embedding.LEGEND, embedding.told(report)
        last = embedding.verdict(report)
    click.secho(legend, dim=True)
    for line in (*lines, *report.problems[1:]):
        click.echo(line)
    click.secho(last, fg="green" if report.ok else "red", bold=True)
