"""How many of the first objects of a prompt a tier has, found in few looks, for several prompts.

What is there of a prompt is there from its beginning on, nearly always: so a few of its objects are
asked for, close together at first and wider behind, and then those between the last that was there
and the first that was not. A prompt of which nothing is there takes one look, one of a thousand
pages three, and all prompts that wait share each look. One that has a hole is taken for whole: who
reads it finds out.
"""

from __future__ import annotations

from queue import Empty
from typing import TYPE_CHECKING, Final

from kvd.core.inputs import Probed
from kvd.core.tiers.keys import each_key
from kvd.storage.backend import ObjectName
from kvd.transfer.orders import UNSTAMPED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from queue import Queue

    from kvd.core.effects import Probe
    from kvd.storage.backend import Backend

TOGETHER: Final = 16
"""Prompts that share a look."""
PLACES: Final = 8
"""Of one prompt that a look asks for, after the first."""


class LeadingSearch:
    """The search of one prompt: the places before ``low`` are there, that of ``high`` is not."""

    def __init__(self, order: Probe) -> None:
        self.order = order
        self.names = [ObjectName(order.namespace, key) for key in each_key(order.keys)]
        self.low, self.high = 0, len(self.names)
        self.why = ""
        self._is_first = True

    @property
    def is_over(self) -> bool:
        """Whether it is known, or cannot be."""
        return self.low == self.high or bool(self.why)

    def places(self) -> list[int]:
        """What to ask for next, in ascending order."""
        if self._is_first:
            wider = (2**n - 1 for n in range(self.high.bit_length() + 1))
            return sorted({place for place in wider if place < self.high} | {self.high - 1})
        stride = -(-(self.high - self.low) // PLACES)
        return list(range(self.low + stride - 1, self.high, stride)) or [self.low]

    def hear(self, places: Iterable[int], there: Iterable[bool], why: str) -> None:
        """Which of those are there; ``why`` some of the answers are not known."""
        self._is_first = False
        for place, is_there in zip(places, there, strict=True):
            if not is_there:
                self.high, self.why = place, why
                return
            self.low = place + 1

    def probed(self) -> Probed:
        """The answer."""
        return Probed(UNSTAMPED, self.order.ticket, self.low, self.why)


def search(backend: Backend, orders: Iterable[Probe]) -> Iterator[Probed]:
    """Answer these orders."""
    searches = [LeadingSearch(order) for order in orders]
    while searches:
        over = [each for each in searches if each.is_over]
        yield from (each.probed() for each in over)
        searches = [each for each in searches if not each.is_over]
        asked = [(each, each.places()) for each in searches]
        names = [each.names[place] for each, places in asked for place in places]
        if not names:
            return
        found = backend.exists(names)
        answers = iter(found.there)
        for each, places in asked:
            each.hear(places, [next(answers) for _ in places], found.why)


def waiting(orders: Queue[Probe]) -> list[Probe]:
    """The orders that wait now, at least one: returns when there is one."""
    found = [orders.get()]
    while len(found) < TOGETHER:
        try:
            found.append(orders.get_nowait())
        except Empty:
            break
    return found
