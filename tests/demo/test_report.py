"""What the demo calls a failure, and how it says so."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from kvd.demo.report import (
    CopiedKv,
    DaemonTotals,
    DemoReport,
    Environment,
    TurnRow,
    WindowPeak,
    controls_told,
    legend_of,
    problems,
    table_of,
    verdict,
)

ROW = TurnRow(
    conversation="first",
    turn=2,
    room=2,
    prompt_tokens=396,
    prefill_prefix_len=336,
    computed_tokens=60,
    decode_prefix_len=352,
    decode_prefix_expected=352,
    pages_sent=3,
    pages_expected=3,
    bytes_sent=3 * 32768,
    bytes_expected=3 * 32768,
    bytes_saved=22 * 32768,
    ttft_ms=41.5,
    handoff_ms=30.25,
    tail_ms=1.26,
    transfer_gbps=0.026,
    answer_tokens=16,
    tokens_equal=True,
    max_logit_difference=1e-5,
)
CONTROL = msgspec.structs.replace(
    ROW, conversation="control", tokens_equal=False, max_logit_difference=7.5, damaged="kv"
)
TOTALS = DaemonTotals(
    sent_bytes=6 * 32768,
    received_bytes=6 * 32768,
    handoffs_delivered=2,
    pages_still_held=0,
    pages_still_locked=0,
)


def change(row: TurnRow, **fields: object) -> TurnRow:
    return msgspec.structs.replace(row, **fields)


def change_report(report: DemoReport, **fields: object) -> DemoReport:
    return msgspec.structs.replace(report, **fields)


def report(*rows: TurnRow, found: tuple[str, ...] = ()) -> DemoReport:
    environment = Environment(
        kvd="0",
        python="3",
        torch="2",
        transformers="5",
        platform="x",
        cpus=2,
        transport="nixl",
        model="llama",
        weights="0",
        seed=1,
        dtype="float32",
        page_size=16,
        order="page_first",
        page_bytes=32768,
    )
    return DemoReport(not found, found, environment, rows, CONTROL, TOTALS, 12.3)


def test_problems_finds_none_when_everything_is_as_it_must_be() -> None:
    assert problems([ROW], [CONTROL], TOTALS) == ()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"tokens_equal": False, "max_logit_difference": 5.0},
            (
                "the tokens differ from a single process",
                "the logits differ by 5, more than rounding explains",
            ),
        ),
        (
            {"tokens_equal": False},
            (
                "the tokens differ from a single process, though no logit by more than 1.0e-05: "
                "two tokens were that close",
            ),
        ),
        (
            {"max_logit_difference": float("nan")},
            ("the logits differ by nan, more than rounding explains",),
        ),
        ({"decode_prefix_len": 336}, ("decode_prefix_len is 336, not 352",)),
        ({"pages_sent": 4}, ("pages sent: 4, not 3",)),
        ({"bytes_expected": 98303}, ("bytes sent: 98304, not 98303",)),
    ],
)
def test_problems_names_what_is_wrong_with_a_turn(
    fields: dict[str, object], problem: tuple[str, ...]
) -> None:
    found = problems([change(ROW, **fields)], [CONTROL], TOTALS)

    assert found == tuple(f"conversation first, turn 2: {text}" for text in problem)


def test_problems_holds_the_turns_against_the_daemons_counters() -> None:
    totals = DaemonTotals(
        sent_bytes=1,
        received_bytes=2,
        handoffs_delivered=3,
        pages_still_held=4,
        pages_still_locked=5,
    )

    assert problems([ROW], [CONTROL], totals) == (
        "prefill daemon counted 1 bytes, its handoffs 196608",
        "decode daemon received 2 bytes of 196608 sent",
        "3 handoffs delivered, 2 asked for",
        "4 pages held and 5 locked although every lease was released",
    )


def test_problems_demands_that_the_negative_control_fails() -> None:
    blind = change(CONTROL, tokens_equal=True, max_logit_difference=2e-6)

    assert problems([ROW], [blind], TOTALS) == (
        "negative control: a page of kv was zeroed, yet no logit differs by more than 2.0e-06: "
        "equal tokens would prove nothing",
    )


WINDOW = WindowPeak(
    crossed=8, prefill_peak=11, prefill_most=11, decode_peak=7, decode_most=8, full=26
)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"prefill_peak": 12},
            "12 window pages at once on the prefill node, which needs at most 11",
        ),
        ({"decode_peak": 9}, "9 window pages at once on the decode node, which needs at most 8"),
        ({"decode_peak": 0}, "0 window pages at once on the decode node, which needs at most 8"),
    ],
)
def test_problems_names_window_pages_that_should_have_gone_back(
    fields: dict[str, int], problem: str
) -> None:
    row = change(ROW, window=msgspec.structs.replace(WINDOW, **fields))

    assert problems([row], [CONTROL], TOTALS) == (f"conversation first, turn 2: {problem}",)


def test_controls_told_says_what_each_damage_did() -> None:
    window = change(CONTROL, damaged="swa", window=WINDOW, max_logit_difference=0.5)
    state = change(CONTROL, damaged="state", states=1, tokens_equal=True)

    told = controls_told(change_report(report(ROW), more_controls=(window, state)))

    assert told == [
        "negative control, one of 3 pages zeroed on the decode node: other tokens, logits differ "
        "by 7.5",
        "negative control, one of 8 window pages zeroed on the decode node: other tokens, logits "
        "differ by 0.5",
        "negative control, the state zeroed on the decode node: equal tokens, logits differ by 7.5",
    ]


def test_verdict_is_one_line() -> None:
    assert verdict(report(ROW)) == (
        "OK: 16 tokens of 1 turns equal a single process; 98304 bytes sent, exactly the pages that "
        "decode lacked, 720896 saved (88%); 12 s"
    )
    assert verdict(report(ROW, found=("a", "b", "c"))) == "FAILED: a (and 2 more)"


def test_verdict_tells_of_window_pages_and_of_states() -> None:
    smaller = msgspec.structs.replace(WINDOW, prefill_peak=9, decode_peak=8, full=23)
    windows = report(change(ROW, window=WINDOW), change(ROW, window=smaller))

    assert verdict(windows) == (
        "OK: 32 tokens of 2 turns equal a single process; 196608 bytes sent, exactly the pages "
        "that decode lacked, 1441792 saved (88%); at most 11 and 8 window pages held where all "
        "tokens would take 26; 12 s"
    )
    assert verdict(report(change(ROW, states=1))) == (
        "OK: 16 tokens of 1 turns equal a single process; 98304 bytes sent, exactly one state per "
        "prompt; 12 s"
    )


def test_table_shows_every_turn() -> None:
    out = io.StringIO()
    retry = change(ROW, conversation="retry", pages_sent=0, bytes_sent=0, transfer_gbps=None)

    Console(file=out, width=100).print(table_of(report(ROW, retry)))

    rows = [" ".join(line.split()) for line in out.getvalue().splitlines()[:3]]
    assert rows == [
        "conversation turn prompt prefix pages sent saved ttft tail dlogit tokens",
        "first 2 396 352 3 96 KiB 704 KiB 42 ms 1.3 ms 1e-05 equal",
        "retry 2 396 352 0 0 KiB 704 KiB 42 ms 1.3 ms 1e-05 equal",
    ]


def test_table_shows_window_pages_against_full_allocation() -> None:
    out = io.StringIO()
    windows = report(change(ROW, window=WINDOW))

    Console(file=out, width=100).print(table_of(windows))

    rows = [" ".join(line.split()) for line in out.getvalue().splitlines()[:2]]
    assert rows == [
        "conversation turn prompt prefix pages sent saved window ttft tail dlogit tokens",
        "first 2 396 352 3 96 KiB 704 KiB 11/7/26 42 ms 1.3 ms 1e-05 equal",
    ]
    assert "how many there would be if every token had one" in legend_of(windows)
    assert legend_of(report(ROW)).endswith("dlogit: largest difference")


@pytest.mark.parametrize(
    ("copied", "found"),
    [
        (CopiedKv(100, 50, 100, 50), ()),
        (CopiedKv(0, 50, 0, 50), ()),
        (CopiedKv(90, 50, 100, 50), ("loaded bytes: 90, not 100",)),
        (CopiedKv(100, 60, 100, 50), ("saved bytes: 60, not 50",)),
        (CopiedKv(7, 0, None, None), ("saved bytes: 0, not some",)),
    ],
)
def test_problems_finds_copies_that_are_not_what_they_must_be(
    copied: CopiedKv, found: tuple[str, ...]
) -> None:
    row = change(ROW, copied=copied)

    assert problems([row], [CONTROL], TOTALS) == tuple(
        f"conversation first, turn 2: {one}" for one in found
    )


def test_verdict_says_what_was_copied_and_where() -> None:
    of_copies = report(change(ROW, copied=CopiedKv(100, 50, 100, 50)))
    environment = msgspec.structs.replace(of_copies.environment, device="cuda:0")

    said = verdict(change_report(of_copies, environment=environment))

    assert "; 50 bytes saved from cuda:0, 100 loaded there; 12 s" in said
