"""What came out of a demo, and whether it is what must come out.

A row is one turn. ``problems`` holds every turn against what was worked out without the daemons:
equal tokens, pages beyond the decode side's prefix, bytes of those pages. The JSON form is the
``Report`` as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

TOLERANCE = {"float32": 1e-3, "float64": 1e-9}
"""Largest difference of a logit that rounding explains: 1e-5 and 0 were seen, and more than 1 after
one page was spoiled."""

LEGEND = (
    "prefix: tokens the decode node had; sent, saved: KV; ttft: until decode has the first token; "
    "tail: what the handoff adds after the prefill's last chunk; dlogit: largest difference"
)


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


class Row(msgspec.Struct, frozen=True):
    """One turn.

    ``ttft_ms``: from the request until the decode engine has the first token. ``handoff_ms``: from
    the first page ready to be sent until the decode side's commit, so most of the prefill is in it;
    ``tail_ms``: only what the handoff adds after the prefill's last chunk. ``transfer_gbps``:
    gigabits sent over ``handoff_ms``, not the speed of the wire; None where nothing was to be sent.
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

    @property
    def name(self) -> str:
        """The turn as messages call it."""
        return f"conversation {self.conversation}, turn {self.turn}"


class Totals(msgspec.Struct, frozen=True):
    """What the two daemons counted, at the end."""

    sent_bytes: int
    received_bytes: int
    handoffs_delivered: int
    pages_still_held: int
    pages_still_locked: int


class Report(msgspec.Struct, frozen=True):
    """Everything; ``problems`` is empty when the demo shows what it must.

    ``control`` is a turn with a page damaged on purpose: its answer must be wrong.
    """

    ok: bool
    problems: tuple[str, ...]
    environment: Environment
    turns: tuple[Row, ...]
    control: Row
    totals: Totals
    seconds: float


def problems(rows: Sequence[Row], control: Row, totals: Totals, *, dtype: str) -> tuple[str, ...]:
    """Every way in which the demo failed to show what it must, in sentences."""
    tolerance = TOLERANCE[dtype]
    found = [f"{row.name}: {what}" for row in rows for what in _answer_problems(row, tolerance)]
    found += [f"{row.name}: {what}" for row in (*rows, control) for what in _figure_problems(row)]
    if control.max_logit_difference <= tolerance:
        found.append(
            "negative control: a page was zeroed, yet no logit differs by more than "
            f"{control.max_logit_difference:.1e}: equal tokens would prove nothing"
        )
    return (*found, *_total_problems((*rows, control), totals))


def _total_problems(rows: Sequence[Row], totals: Totals) -> list[str]:
    """Where the daemons counted something else than the handoffs of ``rows``."""
    found: list[str] = []
    sent = sum(row.bytes_sent for row in rows)
    if totals.sent_bytes != sent:
        found.append(f"prefill daemon counted {totals.sent_bytes} bytes, its handoffs {sent}")
    if totals.received_bytes != sent:
        found.append(f"decode daemon received {totals.received_bytes} bytes of {sent} sent")
    if totals.handoffs_delivered != len(rows):
        found.append(f"{totals.handoffs_delivered} handoffs delivered in {len(rows)} turns")
    if totals.pages_still_held or totals.pages_still_locked:
        found.append(
            f"{totals.pages_still_held} pages held and {totals.pages_still_locked} locked "
            "although every lease was released"
        )
    return found


def _answer_problems(row: Row, tolerance: float) -> list[str]:
    """What is wrong with the answer of one turn."""
    found: list[str] = []
    if not row.tokens_equal and row.max_logit_difference <= tolerance:
        found.append(
            "the tokens differ from a single process, though no logit by more than "
            f"{row.max_logit_difference:.1e}: two tokens were that close; --dtype float64 tells "
            "rounding from an error"
        )
    elif not row.tokens_equal:
        found.append("the tokens differ from a single process")
    if not row.max_logit_difference <= tolerance:
        found.append(
            f"the logits differ by {row.max_logit_difference:.3g}, more than rounding explains"
        )
    return found


def _figure_problems(row: Row) -> list[str]:
    """Which figures of one turn are not what was worked out."""
    figures = (
        ("decode_prefix_len is", row.decode_prefix_len, row.decode_prefix_expected),
        ("pages sent:", row.pages_sent, row.pages_expected),
        ("bytes sent:", row.bytes_sent, row.bytes_expected),
    )
    return [f"{what} {is_}, not {due}" for what, is_, due in figures if is_ != due]


def table_of(report: Report) -> Table:
    """The turns as a table for people."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("conversation")
    headings = ("turn", "prompt", "prefix", "pages", "sent", "saved", "ttft", "tail", "dlogit")
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_column("tokens")
    for row in report.turns:
        table.add_row(
            row.conversation,
            str(row.turn),
            str(row.prompt_tokens),
            str(row.decode_prefix_len),
            str(row.pages_sent),
            f"{row.bytes_sent / 1024:.0f} KiB",
            f"{row.bytes_saved / 1024:.0f} KiB",
            f"{row.ttft_ms:.0f} ms",
            f"{row.tail_ms:.1f} ms",
            f"{row.max_logit_difference:.0e}",
            "equal" if row.tokens_equal else "[bold red]differ[/]",
        )
    return table


def control_told(control: Row) -> str:
    """What the negative control showed."""
    tokens = "equal" if control.tokens_equal else "other"
    return (
        f"negative control, one of {control.pages_sent} pages zeroed on the decode node: {tokens} "
        f"tokens, logits differ by {control.max_logit_difference:.2g}"
    )


def verdict(report: Report) -> str:
    """One line: what was shown, or what was not."""
    if report.problems:
        more = len(report.problems) - 1
        rest = f" (and {more} more)" if more else ""
        return f"FAILED: {report.problems[0]}{rest}"
    rows = report.turns
    tokens = sum(row.answer_tokens for row in rows)
    sent = sum(row.bytes_sent for row in rows)
    saved = sum(row.bytes_saved for row in rows)
    return (
        f"OK: {tokens} tokens of {len(rows)} turns equal a single process; "
        f"{sent} bytes sent, exactly the pages that decode lacked, {saved} saved "
        f"({saved / (sent + saved):.0%}); {report.seconds:.0f} s"
    )
