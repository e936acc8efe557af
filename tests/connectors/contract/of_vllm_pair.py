"""vLLM's connector in a prefill and in a decode engine, whose router asks them in turn.

What does not come is computed by the decode engine. Engines here are in one process: one that is
killed has closed its sessions.
"""

from __future__ import annotations

import itertools
from typing import ClassVar

import pytest

from tests.connectors.contract.cases import HandoffStep, Step
from tests.connectors.contract.engine import NOTHING, Aborted, Happening
from tests.connectors.contract.handoffs import SIDES, HandoffEnd, PlayedHandoffs
from tests.connectors.contract.of_vllm import CHUNK, VllmEngine
from tests.connectors.vllm.stand_ins import Request

KEEP_S = 2.0
"""What nobody fetches is kept so long."""


class SteppingEngine(VllmEngine):
    """Whoever waits in this process has the other engine step too."""

    beside: SteppingEngine | None = None

    def _step(self, *computed, **how):
        super()._step(*computed, **how)
        if self.beside is not None:
            VllmEngine._step(self.beside)


class VllmPair(PlayedHandoffs):
    """A request comes to the prefill engine, and with what this tells to the decode engine."""

    pool: ClassVar = VllmEngine.pool
    waits_for_room = False

    def __init__(self, daemons, *, is_impatient=False, unlike=""):
        if unlike == "pool":
            pytest.skip("of another kind its pool is refused by its own daemon: test_unlike there")
        self._patch = pytest.MonkeyPatch()
        for place, within_s in {
            **({} if is_impatient else VllmEngine.waits),
            **VllmEngine.hurries,
        }.items():
            self._patch.setattr(place, within_s)
        self._daemons = daemons
        self._models = dict(zip(SIDES, ("", unlike), strict=True))
        self._numbers = itertools.count(1)
        self._engines = {}
        for side in SIDES:
            self.start(side)
        self._given_up, self._end = set(), HandoffEnd("", "")

    def begin(self, tokens, happening=NOTHING):
        self._given_up.clear()
        number = next(self._numbers)
        told = why = None
        request = Request(f"p{number}", tokens, {"do_remote_decode": True})
        try:
            told = self._prefill(request, happening)
        except Aborted:
            why = "it was given up"
        if told is None:
            self._end = HandoffEnd(why or "nothing is kept for who decodes", "it was never asked")
            return
        found = self._decode(Request(f"d{number}", tokens, told), happening)
        self._end = HandoffEnd("", "" if found else "nothing came")

    def _prefill(self, request, happening):
        engine = self._engines["prefill"]
        engine.half.arrived(request, lora=None, extra={})
        self._comes_to(HandoffStep.UNMET, happening, engine, request)
        engine._begin(request, NOTHING)
        while request.num_computed_tokens < request.num_tokens:
            n_tokens = min(CHUNK, request.num_tokens - request.num_computed_tokens)
            engine._compute(request, n_tokens)
            self._comes_to(HandoffStep.WRITING, happening, engine, request)
        _, told = engine.half.finished(request)
        engine._give_away(request)
        self._comes_to(HandoffStep.OFFERED, happening, engine, request)
        return told

    def _comes_to(self, step, happening, engine, request):
        """And is given up there, if it was to be."""
        happening(step)
        if self._given_up:
            engine.half.finished(request, is_heard=False)
            engine._give_away(request)
            raise Aborted

    def _decode(self, request, happening):
        """How many tokens came; their KV is looked at."""
        engine = self._engines["decode"]

        def loading():
            happening(HandoffStep.LOADING)
            if "decode" in self._given_up:
                raise Aborted

        engine.half.arrived(request, lora=None, extra={})
        try:
            found = engine._begin(request, Happening(Step.LOADING, loading))
            engine._compute(request, request.num_tokens - request.num_computed_tokens)
        except Aborted:
            found = 0
        engine.half.finished(request)
        engine._give_away(request)
        return found

    def end(self):
        return self._end

    def abort(self, side):
        self._given_up.add(side)

    def kill(self, side):
        self._engines[side].close()
        self._given_up.add(side)

    def start(self, side):
        endpoint = getattr(self._daemons, side).client
        self._engines[side] = SteppingEngine(endpoint, model=self._models[side], keep_s=KEEP_S)
        one, other = (self._engines.get(side) for side in SIDES)
        if one is not None and other is not None:
            one.beside, other.beside = other, one

    def settle(self):
        for engine in self._engines.values():
            engine.settle()

    def close(self):
        for engine in self._engines.values():
            engine.close()
        self._patch.undo()
