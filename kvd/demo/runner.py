"""The demo itself: every turn of the script through the two nodes, and once more without them."""

from __future__ import annotations

import os
import platform
import time
from typing import TYPE_CHECKING

import numpy as np

import kvd
from kvd.demo.conversation import ExpectedCache, Script, write_script
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
from kvd.demo.models import SEED, Architecture
from kvd.demo.processes import DECODE, PREFILL, Stage, open_stage
from kvd.demo.report import (
    CopiedKv,
    DaemonTotals,
    DemoReport,
    Environment,
    TurnRow,
    WindowPeak,
    problems,
)

if TYPE_CHECKING:
    from kvd.demo.conversation import ScriptTurn
    from kvd.demo.layout import PoolLayout
    from kvd.demo.report import ProgressLines

QUIET_S = 5.0
POLL_S = 0.02

SPARE_PAGES = 64
"""Pages beyond what the script needs, the null page among them."""


def run(
    architecture: Architecture, turns: int, watcher: ProgressLines, device: str | None = None
) -> DemoReport:
    """The whole demo; with a ``device`` the engines compute there, in memory of their own.

    Raises:
        DemoFailed: it could not be carried through; a wrong outcome is in the report instead.
    """
    began_s = time.monotonic()
    pool = architecture.pool
    script = write_script(
        turns=turns,
        vocabulary=architecture.shape.vocabulary,
        page_size=pool.page_size,
        seed=SEED,
        controls=len(pool.parts),
    )
    settings = pool.settings(pages_for(pool, script))
    with open_stage(architecture.name, settings, watcher, device) as stage:
        performance = _Performance(architecture, script, stage, device)
        rows = performance.play(watcher)
        watcher.stage("negative control: one page that crossed is zeroed before it is read")
        controls = performance.controls()
        watcher.stage("checking what the daemons counted")
        totals = _totals(stage)
        found = problems(rows, controls, totals)
        environment = _environment(architecture, stage, device or "")
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


def pages_for(pool: PoolLayout, script: Script) -> dict[PoolPart, int]:
    """Pages that hold everything at once: what is cached, and as much again being worked on."""
    rooms = len(script.turns) + len(script.controls)
    tokens = script.cached_tokens_at_most()
    return {
        PoolPart.KV: 2 * (-(-tokens // pool.page_size) + rooms) + SPARE_PAGES,
        # What each room leaves in the cache, and what one prompt has mapped.
        PoolPart.WINDOW: (rooms + 1) * pool.most_window_pages(CHUNK_TOKENS) + 1,
        PoolPart.STATE: rooms + 3,
    }


class _Performance:
    """One pass through the script: what was said so far, and what must be cached by now."""

    def __init__(
        self, architecture: Architecture, script: Script, stage: Stage, device: str | None
    ) -> None:
        self._vocabulary = architecture.shape.vocabulary
        self._pool = architecture.pool
        self._script = script
        self._stage = stage
        self._is_copied = device is not None
        self._said: dict[str, tuple[int, ...]] = {}
        self._room = 0
        self._cached = ExpectedCache(self._pool.page_size)

    def play(self, watcher: ProgressLines) -> tuple[TurnRow, ...]:
        """Hand every turn over, in order; a row of what was seen of each."""
        rows: list[TurnRow] = []
        turns = self._script.turns
        for turn in turns:
            watcher.stage(f"conversation {turn.conversation}, turn {turn.number}")
            rows.append(self._turn(turn, damage=None))
            watcher.turn(rows[-1], len(turns))
        return tuple(rows)

    def controls(self) -> tuple[TurnRow, ...]:
        """More prompts, of which a page of each part in turn is damaged on the decode node."""
        return tuple(
            self._turn(turn, damage=part)
            for part, turn in zip(self._pool.parts, self._script.controls, strict=True)
        )

    def _turn(self, turn: ScriptTurn, *, damage: PoolPart | None) -> TurnRow:
        """One prompt: decode side and prefill side at once, then the reference alone."""
        stage, pool = self._stage, self._pool
        self._room += 1
        prompt = self._said.get(turn.conversation, self._script.system) + turn.message
        due_prefix = pool.usable_prefix(len(prompt), self._cached.prefix_tokens(prompt))
        began_s = time.monotonic()
        stage.decode.tell(DecodePrompt(self._room, prompt, source=PREFILL, damage=damage))
        stage.prefill.tell(PrefillPrompt(self._room, prompt, to=DECODE))
        prefilled = stage.prefill.hear(Prefilled)
        decoded = stage.decode.hear(Decoded)
        stage.reference.tell(Generate(prompt))
        alone = stage.reference.hear(Generated)
        self._said[turn.conversation] = prompt + decoded.tokens
        self._cached.add(prompt + decoded.tokens[:-1])

        due = pool.due_pages(len(prompt), due_prefix)
        bytes_due = pool.bytes_of(due)
        gigabits = prefilled.sent_bytes * 8 / 1e9
        return TurnRow(
            conversation=turn.conversation,
            turn=turn.number,
            room=self._room,
            prompt_tokens=len(prompt),
            prefill_prefix_len=prefilled.prefix_tokens,
            computed_tokens=prefilled.computed_tokens,
            decode_prefix_len=decoded.prefix_tokens,
            decode_prefix_expected=due_prefix,
            pages_sent=prefilled.sent_pages,
            pages_expected=due.get(PoolPart.KV, 0),
            bytes_sent=prefilled.sent_bytes,
            bytes_expected=bytes_due,
            bytes_saved=pool.bytes_of(pool.full_pages(len(prompt))) - bytes_due,
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
            copied=self._copied(len(prompt), prefilled, decoded) if self._is_copied else None,
        )

    def _copied(self, prompt_tokens: int, prefilled: Prefilled, decoded: Decoded) -> CopiedKv:
        """What went between the pools and the engines' own memory, and what was due."""
        pool = self._pool
        page, end = pool.page_size, -(-prompt_tokens // pool.page_size)
        computed = end - prefilled.prefix_tokens // page
        answered = -(-(prompt_tokens + ANSWER_TOKENS - 1) // page) - prompt_tokens // page
        is_whole = PoolPart.WINDOW not in pool.parts
        bytes_of = pool.page_bytes(PoolPart.KV)
        return CopiedKv(
            loaded_bytes=prefilled.loaded_bytes + decoded.loaded_bytes,
            saved_bytes=prefilled.saved_bytes + decoded.saved_bytes,
            loaded_expected=(prefilled.prefix_tokens // page + end) * bytes_of
            if is_whole
            else None,
            saved_expected=(computed + answered) * bytes_of if is_whole else None,
        )

    def _window(
        self, prompt_tokens: int, prefilled: Prefilled, decoded: Decoded
    ) -> WindowPeak | None:
        """What the layers with a window took on both nodes; None where there are none."""
        pool = self._pool
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
        ours = np.frombuffer(prefilled.logits + decoded.logits, "<f8").reshape(-1, self._vocabulary)
        theirs = np.frombuffer(alone.logits, "<f8").reshape(-1, self._vocabulary)
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
        sender, receiver = stage.prefill_daemon.snapshot(), stage.decode_daemon.snapshot()
        pools = (*sender.pools, *receiver.pools)
        held = sum(pool.held_pages + pool.quarantined_pages for pool in pools)
        locked = sum(pool.locked_pages for pool in pools)
        if not held + locked or time.monotonic() > deadline_s:
            break
        time.sleep(POLL_S)
    return DaemonTotals(
        sent_bytes=sender.totals.sent_bytes,
        received_bytes=receiver.totals.received_bytes,
        handoffs_delivered=receiver.totals.handoffs_delivered,
        pages_still_held=held,
        pages_still_locked=locked,
    )


def _environment(architecture: Architecture, stage: Stage, device: str) -> Environment:
    """Where and with what this ran."""
    pool = architecture.pool
    return Environment(
        kvd=kvd.__version__,
        python=platform.python_version(),
        torch=stage.started.torch,
        transformers=stage.started.transformers,
        platform=platform.platform(),
        cpus=len(os.sched_getaffinity(0)),
        transport=stage.decode_daemon.snapshot().transport,
        model=architecture.name,
        weights=stage.started.weights,
        seed=SEED,
        dtype=pool.dtype,
        page_size=pool.page_size,
        order=pool.order,
        page_bytes=pool.page_bytes(pool.parts[0]),
        part_page_bytes={part.value: pool.page_bytes(part) for part in pool.parts},
        device=device,
    )
