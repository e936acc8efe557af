"""The verbs of the flight recorder: ``record`` saves what it has, ``replay`` steps through a file.

A replay needs no daemon: it makes the node that the recording begins with and gives it the same
inputs. Whatever differs from what was recorded ends the verb with 1.
"""

from __future__ import annotations

import shutil
from collections import deque
from pathlib import Path

import click
import msgspec

from kvd import __version__
from kvd.cli import render
from kvd.cli.exits import VerbFailed
from kvd.cli.link import CALL, Target, ask, with_target
from kvd.cli.options import with_format
from kvd.recorder import recording, replay
from kvd.text import clean, duration, event_line
from kvd.types import amount, short
from kvd.wire.admin import Record, Recorded
from kvd.wire.events import Event

WRITE_S = 60.0
"""How long the recorder process may take to write, beside the timeout."""

LAST_EVENTS = 10


@click.command()
@click.option(
    "--out",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Move the recording there; without it it stays in recorder.directory.",
)
@click.option(
    "--hash-objects",
    type=click.IntRange(0, 10_000_000),
    default=2000,
    show_default=True,
    help="Hash the live node's state if it has at most so many objects; the daemon stands still "
    "for about 10 us each.",
)
@with_target
@with_format
def record_command(target: Target, form: str, out: Path | None, hash_objects: int) -> None:
    """Save the inputs of the last minutes, and the node's state before them, to one file.

    The file holds the token ids of prompts: only the daemon's user can read it.
    """
    done = ask(target, Record(CALL, hash_objects), Recorded, wait_s=WRITE_S)
    if out is not None:
        done = msgspec.structs.replace(done, path=str(_moved(Path(done.path), out)))
    if form == "json":
        fields = msgspec.structs.asdict(done)
        del fields["call"]
        render.print_json(fields)
        return
    state = done.state_hash or f"not hashed: more than {hash_objects} objects (--hash-objects)"
    click.echo(clean(done.path))
    click.echo(
        f"{duration(done.seconds)}, {done.inputs} inputs, {amount(done.file_bytes)}; "
        f"to step {done.steps} and event {done.last_event}"
    )
    click.echo(f"state of the live node there: {state}")
    click.echo("It holds the token ids of prompts. To look at it: kvd replay FILE")


def _moved(path: Path, out: Path) -> Path:
    try:
        shutil.move(path, out)
    except OSError as error:
        raise VerbFailed(
            f"the recording lies at {path}, on the daemon's host and for the daemon's user only, "
            f"and cannot be moved to {out}: {error.strerror}"
        ) from error
    return out


class Replayed(msgspec.Struct, frozen=True):
    """What ``kvd replay --json`` writes."""

    header: recording.Header
    outcome: replay.ReplayOutcome
    is_equal: bool
    events: list[Event]


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--until", type=click.IntRange(1), metavar="SEQ", help="Stop after that event.")
@click.option("--events", "is_telling", is_flag=True, help="Print every event, not the last few.")
@click.option("--check", "is_checking", is_flag=True, help="Check every invariant at each step.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write it there."
)
def replay_command(
    file: Path, until: int | None, is_telling: bool, is_checking: bool, json_file: Path | None
) -> None:
    """Step a node through a recording: the same events, the same state at the end.

    Ends with 1 if the state differs from what was recorded, or if --check finds a broken invariant.
    Recordings of strangers are not trusted: they can load and call nothing, but may never end.
    """
    try:
        recorded = recording.read(file)
        head = recorded.header
        click.echo(_headline(head))
        node = replay.begin(recorded)
        click.echo(f"it begins after step {node.steps} and event {node.out.seq}")
        last: deque[Event] = deque(maxlen=LAST_EVENTS)
        kept: list[Event] = []

        def told(event: Event) -> None:
            if is_telling:
                click.echo(event_line(event))
            else:
                last.append(event)
            if json_file is not None:
                kept.append(event)

        outcome = replay.replay(recorded, node, told, until=until, is_checking=is_checking)
    except recording.Damaged as error:
        raise VerbFailed(f"{file} cannot be replayed: {error}") from error
    except OSError as error:
        raise VerbFailed(f"{file} cannot be read: {error.strerror}") from error
    for event in last:
        click.echo(event_line(event))
    if json_file is not None:
        result = Replayed(header=head, outcome=outcome, is_equal=outcome.is_equal, events=kept)
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    for line in _lines(outcome):
        click.echo(clean(line))
    if not outcome.is_equal or outcome.broken:
        raise VerbFailed(_verdict(outcome, head))


def _headline(head: recording.Header) -> str:
    lines = [
        f"{head.node} {short(head.incarnation)}, kvd {head.kvd}, saved {head.saved_at}: {head.why}",
        f"{duration(head.seconds)}, {head.inputs} inputs in "
        f"{amount(head.record_bytes)}, a node of {amount(head.base_bytes)}",
    ]
    if head.kvd != __version__:
        lines.append(f"written by kvd {head.kvd}, this is {__version__}: steps may differ")
    return "\n".join(clean(line) for line in lines)


def _lines(outcome: replay.ReplayOutcome) -> list[str]:
    """What came of it, for people."""
    lines = [
        f"{outcome.inputs} inputs replayed, to step {outcome.steps} and event {outcome.last_event}"
        + (f": {outcome.stopped}" if outcome.stopped else "")
    ]
    lines += [f"step {bug.step}, {bug.happened}, raised {bug.error}" for bug in outcome.bugs]
    lines += [
        f"step {violation.step} broke an invariant: {violation.what}"
        for violation in outcome.broken
    ]
    lines.append(f"{outcome.marks} states on the way were those of the live node")
    lines.append(f"state: {outcome.state_hash}")
    if outcome.stopped or outcome.strayed:
        return lines
    if not outcome.recorded_hash:
        lines.append("the live node's last state is not known")
    elif outcome.recorded_hash == outcome.state_hash:
        lines.append("equal to the live node's")
    return lines


def _verdict(outcome: replay.ReplayOutcome, head: recording.Header) -> str:
    """Why the verb ends with 1."""
    if outcome.strayed:
        return f"the replay went another way: {outcome.strayed}"
    if outcome.broken:
        return f"an invariant is broken after step {outcome.broken[0].step}"
    other = "" if head.kvd == __version__ else f"; replay it with kvd {head.kvd}"
    return (
        f"the replay ended in another state than the live node, which was {outcome.recorded_hash}"
        f"{other}"
    )
