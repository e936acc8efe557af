"""Inputs to the core, effects to the world, events to the bus: the one mutator of the daemon.

An effect may cause an input at once (an order to a transfer process that has just died). Such an
input waits until the effects of the running step are all carried out, so steps never nest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvd.core import effects
from kvd.core.inputs import FromClient
from kvd.errors import Code, Refusal
from kvd.wire.client import Failed

if TYPE_CHECKING:
    from kvd.core.inputs import Input
    from kvd.core.node import Node
    from kvd.observe.bus import Bus

Perform = dict[type, Callable[[Any], None]]
"""Who carries out which effect: Any, because each takes its own type."""


class Reactor:
    """Feeds the node. ``on_bug`` hears of an exception out of a step: always a bug of ours."""

    def __init__(
        self,
        node: Node,
        bus: Bus,
        *,
        clock: Callable[[], float],
        on_bug: Callable[[str, BaseException], None],
    ) -> None:
        self.node = node
        self.clock = clock
        self.perform: Perform = {}
        self._bus = bus
        self._on_bug = on_bug
        self._waiting: deque[Input] = deque()
        self._is_stepping = False

    def feed(self, happened: Input) -> None:
        """Apply one input, carry out its effects in order, publish its events in order."""
        if self._is_stepping:
            self._waiting.append(happened)
            return
        self._is_stepping = True
        try:
            self._step(happened)
            while self._waiting:
                self._step(self._waiting.popleft())
        finally:
            self._is_stepping = False

    def _step(self, happened: Input) -> None:
        # The one place where a bug of the core is caught: it must cost the request that met it,
        # not the node with everybody's pages.
        try:
            step = self.node.step(happened)
        except Exception as error:  # noqa: BLE001
            self._on_bug(f"step {type(happened).__name__}", error)
            step = self.node.out.drain()
            if isinstance(happened, FromClient):
                refusal = Refusal(
                    Code.INTERNAL,
                    f"a bug of the daemon: {error!r}; its log has the traceback, please report it",
                    side=self.node.settings.name,
                )
                answer = effects.Answer(happened.session, Failed(happened.message.call, refusal))
                step.effects.append(answer)
        perform = self.perform
        for effect in step.effects:
            perform[type(effect)](effect)
        self._bus.publish(step.events)
