from __future__ import annotations

import errno
import io
import json
import re
from typing import Any, get_args

import msgspec
import pytest
from typing_extensions import override

from kvd.observe.log import LEVELS, Crashed, Fed, LinesLost, Unfed, configure
from kvd.wire import events

LOST = events.PeerLost(seq=7, at_s=1.5, peer="prefill-0", incarnation="3f", silent_s=2.5)
MOVED = events.Moved(
    8,
    1.5,
    side="decode",
    part=3,
    room=9117,
    peer="prefill-0",
    before="queued",
    after="offered",
    trigger="admitted",
)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_log_writes_one_line_per_event_with_every_field() -> None:
    stream = io.StringIO()
    log = configure(form="json", level="debug", node="decode-0", stream=stream)

    log.write(LOST)
    log.write(MOVED)

    [lost, moved] = lines(stream)
    assert list(lost)[:4] == ["timestamp", "level", "event", "node"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", lost.pop("timestamp"))
    assert lost == {
        "level": "warning",
        "event": "peer-lost",
        "node": "decode-0",
        "seq": 7,
        "at_s": 1.5,
        "peer": "prefill-0",
        "incarnation": "3f",
        "silent_s": 2.5,
    }
    assert (moved["level"], moved["event"], moved["room"], moved["why"]) == (
        "debug",
        "moved",
        9117,
        "",
    )


@pytest.mark.parametrize(
    ("level", "written"),
    [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)],
)
def test_log_leaves_out_what_is_below_its_level(level: str, written: int) -> None:
    stream = io.StringIO()
    log = configure(form="json", level=level, node="n", stream=stream)

    log.write(MOVED)
    log.write(events.Flushed(1, 0.0, freed_pages=2, kept_pages=3))
    log.write(LOST)
    log.write(events.Violation(2, 0.0, what="I1: 3 + 4 != 8"))

    assert len(lines(stream)) == written


def test_console_log_is_for_people_and_without_colours_off_a_terminal() -> None:
    stream = io.StringIO()
    log = configure(form="console", level="info", node="n", stream=stream)

    log.write(LOST)

    line = stream.getvalue()
    assert "[warning  ] peer-lost" in line
    assert "peer=prefill-0" in line
    assert "\x1b" not in line


class Terminal(io.StringIO):
    @override
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_colours_and_a_value_is_quoted_where_its_end_would_not_be_seen() -> None:
    stream = Terminal()
    log = configure(form="auto", level="info", node="n", stream=stream)

    log.write(events.Violation(2, 0.0, what="I1: 3 + 4 != 8"))

    line = stream.getvalue()
    assert "\x1b[31m\x1b[1merror    \x1b[0m" in line
    assert "\x1b[36mwhat\x1b[0m=\x1b[35m'I1: 3 + 4 != 8'\x1b[0m" in line
    assert line.endswith("\x1b[36mnode\x1b[0m=\x1b[35mn\x1b[0m\n")


def test_columns_end_with_the_traceback_of_a_crash() -> None:
    stream = io.StringIO()
    log = configure(form="console", level="info", node="n", stream=stream)

    log.crashed("reactor", RuntimeError("boom"))

    head, trace = stream.getvalue().split("\n", 1)
    assert head.endswith("""task=reactor error="RuntimeError('boom')" node=n""")
    assert trace.endswith("RuntimeError: boom\n\n")


def test_auto_is_json_where_there_is_no_terminal() -> None:
    stream = io.StringIO()

    configure(form="auto", level="info", node="n", stream=stream).write(LOST)

    assert lines(stream)[0]["event"] == "peer-lost"


def test_a_line_cannot_be_split_by_what_a_peer_says() -> None:
    stream = io.StringIO()
    log = configure(form="json", level="info", node="n", stream=stream)

    log.write(
        events.MessageRefused(
            1, 0.0, socket="peers", sender="a\nb\x1b[2J", code="bad-request", why="why"
        )
    )

    assert [line["sender"] for line in lines(stream)] == ["a\nb\x1b[2J"]

    stream = io.StringIO()
    log = configure(form="console", level="info", node="n", stream=stream)

    log.write(
        events.MessageRefused(
            1, 0.0, socket="peers", sender="a\nb\x1b[2J", code="bad-request", why="why"
        )
    )

    assert stream.getvalue().count("\n") == 1
    assert "sender=a\\nb\\x1b[2J" in stream.getvalue()


def test_a_crash_is_written_with_its_traceback() -> None:
    stream = io.StringIO()
    log = configure(form="json", level="error", node="n", stream=stream)

    log.crashed("reactor", RuntimeError("boom"))

    [line] = lines(stream)
    assert (line["level"], line["event"], line["task"]) == ("error", "crashed", "reactor")
    assert line["error"] == "RuntimeError('boom')"
    assert line["exception"].endswith("RuntimeError: boom\n")


def test_a_log_that_cannot_be_written_counts_and_goes_on() -> None:
    stream = io.StringIO()
    log = configure(form="json", level="info", node="n", stream=stream)
    stream.close()

    log.write(LOST)
    log.write(LOST)

    assert log.lost_lines == 2


@pytest.mark.parametrize(("level", "shown"), [("info", "warning"), ("error", "error")])
def test_a_log_that_can_be_written_again_says_how_much_it_lost(level: str, shown: str) -> None:
    stream = Full()
    log = configure(form="json", level=level, node="n", stream=stream)
    for _ in range(3):
        log.crashed("reactor", RuntimeError("boom"))
    stream.is_full = False

    log.crashed("reactor", RuntimeError("boom"))
    log.crashed("reactor", RuntimeError("boom"))

    [told, *rest] = lines(stream)
    assert (told["level"], told["event"], told["lines"]) == (shown, "lines-lost", 3)
    assert [line["event"] for line in rest] == ["crashed", "crashed"]
    assert log.lost_lines == 0


class Full(io.StringIO):
    """A file on a disk that is full at first."""

    is_full = True

    @override
    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "no space left on device")
        return super().write(text)


def test_levels_name_existing_events_and_no_field_hides_the_head_of_a_line() -> None:
    kinds = (*get_args(events.Event), Crashed, Unfed, Fed, LinesLost)

    assert set(LEVELS) <= {kind.__struct_config__.tag for kind in kinds}
    head = {"timestamp", "level", "event", "node", "type"}
    assert [kind for kind in kinds if head & {f.name for f in msgspec.structs.fields(kind)}] == []
