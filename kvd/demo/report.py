"""What came out of a demo, and whether it is what must come out.

A row is one turn. ``problems`` holds every turn against what was worked out without the daemons:
equal tokens, pages beyond the decode side's prefix, bytes of those pages. The JSON form is the
``DemoReport`` as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.progress import Progress

LEGEND = (
    "prefix: tokens the decode node had; sent, saved: KV; ttft: until decode has the first token; "
    "tail: what the handoff adds after the prefill's last chunk; dlogit: largest difference"
)

WINDOW_LEGEND = (
    "window: most window pages of the lease on the prefill and on the decode node, and how many "
    "there would be if every token had one"
)

TOLERANCE = 1e-3
"""The largest difference of a logit that rounding explains: 1e-5 was seen, and more than 1 after
one page was spoiled."""


class Environment(msgspec.Struct, frozen=True):
    """Where and with what the demo ran."""

    kvd: str
    python: str
    torch: str
    transformers: str
    platform: str
    cpus: int
    transport: str
    model: str
    weights: str
    seed: int
    dtype: str
    page_size: int
    order: str
    page_bytes: int
    part_page_bytes: dict[str, int] = {}
    """Bytes of a page of each part of the pool that has any; ``page_bytes`` is the first one's."""
    device: str = ""
    """Where the engines computed in memory of their own; empty: in the pools."""


class WindowPeak(msgspec.Struct, frozen=True):
    """What the layers with a window took, in their pages.

    ``crossed`` were sent. The peaks are the most that the lease had at once, ``most`` what it may
    have, worked out; ``full`` is what prompt and answer would take if these layers looked at every
    token. ``slides``: how often the lease slid.
    """

    crossed: int
    prefill_peak: int
    prefill_most: int
    decode_peak: int
    decode_most: int
    full: int
    prefill_slides: int = 0
    decode_slides: int = 0


class CopiedKv(msgspec.Struct, frozen=True):
    """What the two engines of a turn copied between the pools and memory of their own.

    What was due is worked out where all layers look at every token; None elsewhere.
    """

    loaded_bytes: int
    saved_bytes: int
    loaded_expected: int | None
    saved_expected: int | None


class TurnRow(msgspec.Struct, frozen=True):
    """One turn.

    ``ttft_ms``: from the request until the decode engine has the first token. ``handoff_ms``: from
    the first page ready to be sent until the decode side's commit, so most of the prefill is in it;
    ``tail_ms``: only what the handoff adds after the prefill's last chunk. ``transfer_gbps``:
    gigabits sent over ``handoff_ms``, not the speed of the wire; None where nothing was to be sent.
    ``pages_sent`` counts pages of tokens, the bytes everything. ``bytes_saved``: what would have
    been sent beyond that with nothing cached, and with all layers alike. ``damaged``: the part of
    which a page was zeroed, in a negative control. Where ``states`` cross, pages are single tokens
    that have no KV.
    """

    conversation: str
    turn: int
    room: int
    prompt_tokens: int
    prefill_prefix_len: int
    computed_tokens: int
    decode_prefix_len: int
    decode_prefix_expected: int
    pages_sent: int
    pages_expected: int
    bytes_sent: int
    bytes_expected: int
    bytes_saved: int
    ttft_ms: float
    handoff_ms: float
    tail_ms: float
    transfer_gbps: float | None
    answer_tokens: int
    tokens_equal: bool
    max_logit_difference: float
    window: WindowPeak | None = None
    damaged: str | None = None
    states: int = 0
    copied: CopiedKv | None = None

    @property
    def told(self) -> str:
        """The turn in a line."""
        sent = f"{self.states} state" if self.states else f"{self.pages_sent} pages"
        tokens = "tokens equal" if self.tokens_equal else "TOKENS DIFFER"
        return (
            f"{self.conversation} turn {self.turn}: {self.prompt_tokens} tokens, "
            f"{self.decode_prefix_len} cached on the decode node, {sent} sent, "
            f"first token after {self.ttft_ms:.0f} ms, {tokens}"
        )

    @property
    def name(self) -> str:
        """The turn as messages call it."""
        return f"conversation {self.conversation}, turn {self.turn}"


class DaemonTotals(msgspec.Struct, frozen=True):
    """What the two daemons counted, at the end."""

    sent_bytes: int
    received_bytes: int
    handoffs_delivered: int
    pages_still_held: int
    pages_still_locked: int


class DemoReport(msgspec.Struct, frozen=True):
    """Everything; ``problems`` is empty when the demo shows what it must.

    ``control`` is a turn with a page damaged on purpose: its answer must be wrong. There is one for
    each part of the pool, the first part's first.
    """

    ok: bool
    problems: tuple[str, ...]
    environment: Environment
    turns: tuple[TurnRow, ...]
    control: TurnRow
    totals: DaemonTotals
    seconds: float
    more_controls: tuple[TurnRow, ...] = ()


def problems(
    rows: Sequence[TurnRow], controls: Sequence[TurnRow], totals: DaemonTotals
) -> tuple[str, ...]:
    """Every way in which the demo failed to show what it must, in sentences."""
    everything = (*rows, *controls)
    found = [f"{row.name}: {what}" for row in rows for what in _answer_problems(row)]
    found += [f"{row.name}: {what}" for row in everything for what in _figure_problems(row)]
    found += [
        f"negative control: a page of {control.damaged} was zeroed, yet no logit differs by more "
        f"than {control.max_logit_difference:.1e}: equal tokens would prove nothing"
        for control in controls
        if control.max_logit_difference <= TOLERANCE
    ]
    return (*found, *_total_problems(everything, totals))


def _total_problems(rows: Sequence[TurnRow], totals: DaemonTotals) -> list[str]:
    """Where the daemons counted something else than the handoffs of ``rows``."""
    found: list[str] = []
    sent = sum(row.bytes_sent for row in rows)
    if totals.sent_bytes != sent:
        found.append(f"prefill daemon counted {totals.sent_bytes} bytes, its handoffs {sent}")
    if totals.received_bytes != sent:
        found.append(f"decode daemon received {totals.received_bytes} bytes of {sent} sent")
    if totals.handoffs_delivered != len(rows):
        found.append(f"{totals.handoffs_delivered} handoffs delivered, {len(rows)} asked for")
    if totals.pages_still_held or totals.pages_still_locked:
        found.append(
            f"{totals.pages_still_held} pages held and {totals.pages_still_locked} locked "
            "although every lease was released"
        )
    return found


def _answer_problems(row: TurnRow) -> list[str]:
    """What is wrong with the answer of one turn."""
    found: list[str] = []
    worst = row.max_logit_difference
    if not row.tokens_equal:
        close = f", though no logit by more than {worst:.1e}: two tokens were that close"
        found.append(
            f"the tokens differ from a single process{close if worst <= TOLERANCE else ''}"
        )
    if not worst <= TOLERANCE:
        found.append(f"the logits differ by {worst:.3g}, more than rounding explains")
    return found


def _figure_problems(row: TurnRow) -> list[str]:
    """Which figures of one turn are not what was worked out.

    Also where window pages were kept that had to go back; or none were seen at all.
    """
    figures = (
        ("decode_prefix_len is", row.decode_prefix_len, row.decode_prefix_expected),
        ("pages sent:", row.pages_sent, row.pages_expected),
        ("bytes sent:", row.bytes_sent, row.bytes_expected),
    )
    found = [f"{what} {is_}, not {due}" for what, is_, due in figures if is_ != due]
    if row.copied is not None:
        found += _copy_problems(row.copied)
    if row.window is None:
        return found
    peaks = (
        ("prefill", row.window.prefill_peak, row.window.prefill_most),
        ("decode", row.window.decode_peak, row.window.decode_most),
    )
    return found + [
        f"{peak} window pages at once on the {node} node, which needs at most {most}"
        for node, peak, most in peaks
        if not 0 < peak <= most
    ]


def _copy_problems(copied: CopiedKv) -> list[str]:
    """Where the engines copied more or less than is theirs to copy."""
    figures = (
        ("loaded", copied.loaded_bytes, copied.loaded_expected),
        ("saved", copied.saved_bytes, copied.saved_expected),
    )
    return [
        f"{what} bytes: {is_}, not {'some' if due is None else due}"
        for what, is_, due in figures
        if is_ != due and (due is not None or not is_)
    ]


class ProgressLines:
    """A line for each turn; on a terminal a bar below them says what is going on."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None)

    def stage(self, what: str) -> None:
        """``what`` begins."""
        if self._progress.disable:
            self._print(what)
        self._progress.update(self._task, description=what)

    def turn(self, row: TurnRow, turns: int) -> None:
        """One of ``turns`` turns is over."""
        self._print(f"  {row.told}")
        self._progress.update(self._task, total=turns, advance=1)

    def _print(self, line: str) -> None:
        self._progress.console.print(line, highlight=False, markup=False, soft_wrap=True)


def table_of(report: DemoReport) -> Table:
    """The turns as a table for people."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("conversation")
    unit = "states" if any(row.states for row in report.turns) else "pages"
    headings = ["turn", "prompt", "prefix", unit, "sent", "saved"]
    headings += ["window"] if any(row.window for row in report.turns) else []
    for heading in (*headings, "ttft", "tail", "dlogit"):
        table.add_column(heading, justify="right")
    table.add_column("tokens")
    for row in report.turns:
        window = row.window
        table.add_row(
            row.conversation,
            str(row.turn),
            str(row.prompt_tokens),
            str(row.decode_prefix_len),
            str(row.states or row.pages_sent),
            f"{row.bytes_sent / 1024:.0f} KiB",
            f"{row.bytes_saved / 1024:.0f} KiB",
            *([f"{window.prefill_peak}/{window.decode_peak}/{window.full}"] if window else []),
            f"{row.ttft_ms:.0f} ms",
            f"{row.tail_ms:.1f} ms",
            f"{row.max_logit_difference:.0e}",
            "equal" if row.tokens_equal else "[bold red]differ[/]",
        )
    return table


def legend_of(report: DemoReport) -> str:
    """What the headings of the table mean."""
    if any(row.window is not None for row in report.turns):
        return f"{LEGEND}; {WINDOW_LEGEND}"
    return LEGEND


def controls_told(report: DemoReport) -> list[str]:
    """What the negative controls showed, a line for each."""
    lines: list[str] = []
    for control in (report.control, *report.more_controls):
        tokens = "equal" if control.tokens_equal else "other"
        what = {
            "kv": f"one of {control.pages_sent} pages",
            "swa": f"one of {control.window.crossed if control.window else 0} window pages",
            "state": "the state",
        }[control.damaged or "kv"]
        lines.append(
            f"negative control, {what} zeroed on the decode node: {tokens} "
            f"tokens, logits differ by {control.max_logit_difference:.2g}"
        )
    return lines


def verdict(report: DemoReport) -> str:
    """One line: what was shown, or what was not."""
    if report.problems:
        more = len(report.problems) - 1
        rest = f" (and {more} more)" if more else ""
        return f"FAILED: {report.problems[0]}{rest}"
    rows = report.turns
    tokens = sum(row.answer_tokens for row in rows)
    sent = sum(row.bytes_sent for row in rows)
    saved = sum(row.bytes_saved for row in rows)
    what = f"exactly the pages that decode lacked, {saved} saved ({saved / (sent + saved):.0%})"
    if any(row.states for row in rows):
        what = "exactly one state per prompt"
    return (
        f"OK: {tokens} tokens of {len(rows)} turns equal a single process; {sent} bytes sent, "
        f"{what}{_window_told(rows)}{_copied_told(report)}; {report.seconds:.0f} s"
    )


def _copied_told(report: DemoReport) -> str:
    """What went between the pools and memory of the engines, where that is their own."""
    copied = [row.copied for row in report.turns if row.copied is not None]
    if not copied:
        return ""
    saved = sum(each.saved_bytes for each in copied)
    loaded = sum(each.loaded_bytes for each in copied)
    return f"; {saved} bytes saved from {report.environment.device}, {loaded} loaded there"


def _window_told(rows: Sequence[TurnRow]) -> str:
    """The most window pages that a lease had, against all tokens having one."""
    windows = [row.window for row in rows if row.window is not None]
    if not windows:
        return ""
    prefill = max(window.prefill_peak for window in windows)
    decode = max(window.decode_peak for window in windows)
    full = max(window.full for window in windows)
    return f"; at most {prefill} and {decode} window pages held where all tokens would take {full}"
