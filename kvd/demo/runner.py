"""The demo itself: every turn of the script through the two nodes, and once more without them."""

from __future__ import annotations

import os
import platform
import time
from typing import TYPE_CHECKING, Protocol

import numpy as np

import kvd
from kvd.demo.conversation import Dialogues, ExpectedCache
from kvd.demo.division import due_of_each
from kvd.demo.layout import PoolPart
from kvd.demo.messages import (
    ANSWER_TOKENS,
    CHUNK_TOKENS,
    STEP_TOKENS,
    Decoded,
    DecodePrompt,
    Generate,
    Generated,
    Prefilled,
    PrefillPrompt,
)
from kvd.demo.processes import ANSWER_S, DECODE, POLL_S, Stage, Watcher, ask, open_stage
from kvd.demo.report import (
    DaemonTotals,
    DemoReport,
    Environment,
    SenderFigures,
    TurnRow,
    WindowPeak,
    problems,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.demo.conversation import Script, ScriptTurn
    from kvd.demo.division import SentPages
    from kvd.demo.settings import DemoSettings

QUIET_S = 5.0


class TurnWatcher(Watcher, Protocol):
    """Whoever shows the progress of the turns too."""

    def turn(self, row: TurnRow, turns: int) -> None:
        """One more of ``turns`` is over."""


def run(settings: DemoSettings, watcher: TurnWatcher) -> DemoReport:
    """The whole demo.

    Raises:
        DemoFailed: it could not be carried through; a wrong outcome is in the report instead.
    """
    began_s = time.monotonic()
    script = settings.script()
    with open_stage(settings, pages=settings.pages(script), watcher=watcher) as stage:
        performance = _Performance(settings, script, stage)
        rows = performance.play(watcher)
        watcher.stage("negative control: one page that crossed is zeroed before it is read")
        controls = performance.controls()
        watcher.stage("checking what the daemons counted")
        totals = _totals(stage)
        found = problems(rows, controls, totals, tolerance=settings.tolerance)
        environment = _environment(settings, stage)
    return DemoReport(
        ok=not found,
        problems=found,
        environment=environment,
        turns=rows,
        control=controls[0],
        more_controls=controls[1:],
        totals=totals,
        seconds=round(time.monotonic() - began_s, 2),
    )


class _Performance:
    """One pass through the script: what was said so far, and what must be cached by now."""

    def __init__(self, settings: DemoSettings, script: Script, stage: Stage) -> None:
        self._settings = settings
        self._script = script
        self._stage = stage
        self._dialogues = Dialogues(script.system)
        self._cached = ExpectedCache(settings.pool.page_size)

    def play(self, watcher: TurnWatcher) -> tuple[TurnRow, ...]:
        """All turns."""
        rows: list[TurnRow] = []
        turns = self._script.turns
        for room, turn in enumerate(turns, start=1):
            watcher.stage(f"conversation {turn.conversation}, turn {turn.number}")
            rows.append(self._turn(room, turn, damage=None))
            watcher.turn(rows[-1], len(turns))
        return tuple(rows)

    def controls(self) -> tuple[TurnRow, ...]:
        """More prompts, of which a page of each part in turn is damaged on the decode node."""
        parts = self._settings.pool.parts
        room = len(self._script.turns) + 1
        return tuple(
            self._turn(number, turn, damage=part)
            for number, (part, turn) in enumerate(
                zip(parts, self._script.controls, strict=True), start=room
            )
        )

    def _turn(self, room: int, turn: ScriptTurn, *, damage: PoolPart | None) -> TurnRow:
        """One prompt: decode side and prefill side at once, then the reference alone."""
        prompt = self._dialogues.prompt(turn)
        pool = self._settings.pool
        due_prefix = pool.usable_prefix(len(prompt), self._cached.prefix_tokens(prompt))
        began_s = time.monotonic()
        sources = self._settings.prefill_nodes
        self._stage.decode.tell(DecodePrompt(room, prompt, sources, damage=damage))
        self._stage.prefill.tell(PrefillPrompt(room, prompt, to=DECODE))
        prefilled = self._stage.prefill.hear(Prefilled, within_s=ANSWER_S)
        decoded = self._stage.decode.hear(Decoded, within_s=ANSWER_S)
        alone = ask(self._stage.reference, Generate(prompt), Generated)
        self._dialogues.answered(turn, prompt, decoded.tokens)
        self._cached.add(prompt + decoded.tokens[:-1])

        due = pool.due_pages(len(prompt), due_prefix)
        senders = self._senders(prefilled.sent, due)
        uncached = self._senders(prefilled.sent, pool.full_pages(len(prompt)))
        bytes_sent, bytes_due = (
            sum(one.bytes_sent for one in senders),
            sum(one.bytes_expected for one in senders),
        )
        gigabits = bytes_sent * 8 / 1e9
        return TurnRow(
            conversation=turn.conversation,
            turn=turn.number,
            room=room,
            prompt_tokens=len(prompt),
            prefill_prefix_len=prefilled.prefix_tokens,
            computed_tokens=prefilled.computed_tokens,
            decode_prefix_len=decoded.prefix_tokens,
            decode_prefix_expected=due_prefix,
            pages_sent=sum(one.pages_sent for one in senders),
            pages_expected=sum(one.pages_expected for one in senders),
            bytes_sent=bytes_sent,
            bytes_expected=bytes_due,
            bytes_saved=sum(one.bytes_expected for one in uncached) - bytes_due,
            ttft_ms=round((decoded.first_token_at_s - began_s) * 1e3, 3),
            handoff_ms=round(prefilled.handoff_s * 1e3, 3),
            tail_ms=round(prefilled.tail_s * 1e3, 3),
            transfer_gbps=round(gigabits / prefilled.handoff_s, 4) if gigabits else None,
            answer_tokens=len(decoded.tokens),
            tokens_equal=decoded.tokens == alone.tokens,
            max_logit_difference=self._logit_difference(prefilled, decoded, alone),
            window=self._window(len(prompt), prefilled, decoded),
            damaged=None if damage is None else damage.value,
            states=due.get(PoolPart.STATE, 0),
            senders=senders if len(senders) > 1 else (),
        )

    def _senders(
        self, sent: Sequence[SentPages], pages: dict[PoolPart, int]
    ) -> tuple[SenderFigures, ...]:
        """What each prefill daemon sent, and what it had to send of so many pages."""
        settings = self._settings
        due = due_of_each(settings.pool, pages, settings.prefill, settings.decode)
        return tuple(
            SenderFigures(
                node=name,
                pages_sent=one.pages,
                pages_expected=must.pages,
                bytes_sent=one.bytes,
                bytes_expected=must.bytes,
            )
            for name, one, must in zip(settings.prefill_nodes, sent, due, strict=True)
        )

    def _window(
        self, prompt_tokens: int, prefilled: Prefilled, decoded: Decoded
    ) -> WindowPeak | None:
        """What the layers with a window took on both nodes; None where there are none."""
        pool = self._settings.pool
        if PoolPart.WINDOW not in pool.parts:
            return None
        return WindowPeak(
            crossed=pool.due_pages(prompt_tokens, 0)[PoolPart.WINDOW],
            prefill_peak=prefilled.peak_window_pages,
            prefill_most=pool.most_window_pages(CHUNK_TOKENS),
            decode_peak=decoded.peak_window_pages,
            decode_most=pool.most_window_pages(STEP_TOKENS),
            full=-(-(prompt_tokens + ANSWER_TOKENS) // pool.page_size),
            prefill_slides=prefilled.slides,
            decode_slides=decoded.slides,
        )

    def _logit_difference(self, prefilled: Prefilled, decoded: Decoded, alone: Generated) -> float:
        """The largest one, up to the first token that differs: beyond it the contexts do too."""
        vocabulary = self._settings.architecture.shape.vocabulary
        ours = np.frombuffer(prefilled.logits + decoded.logits, "<f8").reshape(-1, vocabulary)
        theirs = np.frombuffer(alone.logits, "<f8").reshape(-1, vocabulary)
        same = 0
        for mine, other in zip(decoded.tokens, alone.tokens, strict=True):
            same += 1
            if mine != other:
                break
        return float(np.abs(ours[:same] - theirs[:same]).max())


def _totals(stage: Stage) -> DaemonTotals:
    """What both daemons counted, once they are quiet: a release may be answered before it is done.

    Not quiet in time is no error here: it is a problem that the report names.
    """
    deadline_s = time.monotonic() + QUIET_S
    while True:
        senders, receiver = stage.prefill_daemons(), stage.decode_daemon()
        pools = [pool for daemon in (*senders, receiver) for pool in daemon.pools]
        held = sum(pool.held_pages + pool.quarantined_pages for pool in pools)
        locked = sum(pool.locked_pages for pool in pools)
        if not held + locked or time.monotonic() > deadline_s:
            break
        time.sleep(POLL_S)
    return DaemonTotals(
        sent_bytes=sum(sender.totals.sent_bytes for sender in senders),
        received_bytes=receiver.totals.received_bytes,
        handoffs_delivered=receiver.totals.handoffs_delivered,
        pages_still_held=held,
        pages_still_locked=locked,
    )


def _environment(settings: DemoSettings, stage: Stage) -> Environment:
    """Where and with what this ran."""
    pool = settings.pool
    return Environment(
        kvd=kvd.__version__,
        python=platform.python_version(),
        torch=stage.models.torch,
        transformers=stage.models.transformers,
        platform=platform.platform(),
        cpus=len(os.sched_getaffinity(0)),
        transport=stage.decode_daemon().transport,
        model=settings.model,
        weights=stage.models.weights,
        seed=settings.seed,
        dtype=settings.dtype,
        page_size=pool.page_size,
        order=settings.order,
        page_bytes=pool.page_bytes(pool.parts[0]),
        part_page_bytes={part.value: pool.page_bytes(part) for part in pool.parts},
        prefill=settings.prefill,
        decode=settings.decode,
    )
