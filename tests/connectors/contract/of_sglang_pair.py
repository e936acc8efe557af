"""SGLang's prefill and decode engines, each with its own queues in a process (``pd_engine``)."""

from __future__ import annotations

import atexit
import functools
import tempfile
from typing import ClassVar

from tests.connectors.contract.cases import HandoffStep
from tests.connectors.contract.engine import NOTHING
from tests.connectors.contract.handoffs import SIDES, HandoffEnd, PlayedHandoffs
from tests.connectors.sglang.pd_pair import IMPATIENT, MHA_BYTES, PYTHON, PlayedPair, SGLang
from tests.connectors.sglang.world import settings_for

if not PYTHON:
    raise ImportError("set KVD_SGLANG_PYTHON to a Python with SGLang 0.5.23")

STOPS = {
    HandoffStep.OFFERED: ("prefill", "offered"),
    HandoffStep.WRITING: ("prefill", "ordered"),
    HandoffStep.LOADING: ("decode", "ordered"),
}
"""Which engine's handoff stops there, and at which step of the connector's."""

UNLIKE = {"": {}, "model": {"settings": {"kvd.weights": "other"}}, "pool": {"kv": "mla"}}


@functools.cache
def _sglang():
    directory = tempfile.TemporaryDirectory(prefix="kvd-pd-")
    atexit.register(directory.cleanup)
    found = SGLang(directory.name)
    atexit.register(found.close)
    return found


class SglangPair(PlayedHandoffs):
    """A request that fails is an error to its client, with kvd's reason in it."""

    pool: ClassVar = settings_for(MHA_BYTES, 200)
    waits_for_room = True

    def __init__(self, daemons, *, is_impatient=False, unlike=""):
        told = {"env": IMPATIENT if is_impatient else {}}
        self._told = {"prefill": told, "decode": told | UNLIKE[unlike]}
        self._pair = PlayedPair(_sglang(), daemons, **self._told)
        self._pair.wait_ready()
        self._rid, self._killed = "", set()

    def begin(self, tokens, happening=NOTHING):
        at, pair = None if happening.has_come else happening.at, self._pair
        if at is HandoffStep.UNMET:
            self._rid = pair.add(tokens, to=("decode",))
            happening(at)
            rest = [side for side in ("prefill",) if side not in self._killed]
            pair.add(tokens, to=rest, room=int(self._rid[1:]))
            return
        if at is None:
            self._rid = pair.add(tokens)
            return
        side, step = STOPS[at]
        engine = getattr(pair, side)
        engine.tell("stop at", step)
        self._rid = pair.add(tokens)
        # It may have failed before, by what a former fault has left.
        if not engine.ranks[0].comes_to_stop(self._rid):
            return
        happening(at)
        if side not in self._killed:
            engine.tell("go")

    def end(self):
        whys = []
        for side in SIDES:
            if side in self._killed:
                whys.append("its engine was killed")
                continue
            told = getattr(self._pair, side).hear("over", rid=self._rid)
            whys.append(told["why"] if told["over"] == "aborted" else "")
        return HandoffEnd(*whys)

    def abort(self, side):
        getattr(self._pair, side).tell("abort", self._rid)

    def kill(self, side):
        getattr(self._pair, side).kill()
        self._killed.add(side)

    def start(self, side):
        setattr(self._pair, side, self._pair.engine(side, self._told[side]))
        getattr(self._pair, side).hear("ready")
        self._killed.discard(side)

    def settle(self):
        self._pair.nothing_is_held()

    def close(self):
        self._pair.close()
