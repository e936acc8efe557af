"""A store that nodes share, used at random: no ceiling is exceeded, and what is pinned stays.

The store is played, and removes what is older than its lifetime. So what lies there of a namespace
is counted where it lies, and not where the node counts it.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvd.core.audit.invariants import violations
from kvd.core.cache.namespaces import base_of
from kvd.core.layout.quota import Quota
from kvd.core.settings import Demotion
from kvd.wire import admin
from kvd.wire.pins import PinPrefix, PrefixPinned, UnpinPrefix
from tests.core.storing import LIFETIME_S, store
from tests.core.tiered import PAGE, cached, tokens
from tests.support.seeds import repeatable, seed_range

CEILINGS = {"a": 12, "b": 7}
NAMESPACES = ("a", "a#1", "b", "b", "c")
STEPS = 60
QUIET_S = 0.5 * LIFETIME_S


class Walk:
    """One node, its engine that pins, and what it does next."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.world = store(
            d_pages=rng.choice((25, 33, 65)),
            moving=rng.choice((2, 16)),
            demotion=rng.choice((Demotion.ALWAYS, Demotion.ALWAYS, Demotion.SECOND_USE)),
            quotas=tuple([Quota(name, 0, most) for name, most in CEILINGS.items()]),
            least_bytes=2**20,
        )
        self.side = self.world.d
        self.session = self.side.attach("pins")
        self.pins: dict[int, tuple] = {}
        self.generation = 1
        self.troubled_s = self.world.now_s
        """When it was last in trouble, or a pin began."""

    def prompt(self) -> tuple:
        rng = self.rng
        first = 1000 * rng.randint(1, 12)
        return tokens((first, PAGE * rng.randint(1, 6))), rng.choice(NAMESPACES)

    def compute(self) -> None:
        cached(self.side, *self.prompt())
        self.world.pass_time(0.1)

    def wait(self) -> None:
        self.world.pass_time(self.rng.choice((0.2, 1.0, 4.0)))

    def pin(self) -> None:
        toks, namespace = self.prompt()
        cached(self.side, toks, namespace)
        reply = self.side.call(
            PinPrefix, toks, ttl_s=9000.0, session=self.session, namespace=namespace
        )
        if isinstance(reply, PrefixPinned):
            self.pins[reply.pin] = (toks, namespace)
        self.troubled_s = self.world.now_s

    def unpin(self) -> None:
        if self.pins:
            pin = self.rng.choice(list(self.pins))
            del self.pins[pin]
            self.side.call(UnpinPrefix, session=self.session, pin=pin)

    def flush(self) -> None:
        self.side.ask(admin.Flush(1))
        self.troubled_s = self.world.now_s

    def trouble(self) -> None:
        side = self.side
        if self.rng.random() < 0.5:
            side.fails_writing = "no answer"
            self.world.pass_time(1.0)
            side.fails_writing = ""
        else:
            side.stop_storage()
            self.world.pass_time(1.0)
            self.generation += 1
            side.start_storage(self.generation)
        self.troubled_s = self.world.now_s + 8.0

    def step(self) -> None:
        steps = (*[self.compute] * 8, self.wait, self.wait, self.pin)
        self.rng.choice((*steps, self.unpin, self.flush, self.trouble))()

    def check(self) -> None:
        side, now_s = self.side, self.world.now_s
        side.remove_old()
        there = Counter([base_of(namespace) for namespace, _ in side.stored.objects])
        for name, most in CEILINGS.items():
            assert there[name] <= most
        assert not violations(side.node)
        known = side.node.pins.by_id
        self.pins = {pin: what for pin, what in self.pins.items() if pin in known}
        for pin, (toks, namespace) in self.pins.items():
            kept = side.node.tiers.pins.kept(pin)
            if kept and kept[0].pages == kept[0].of_pages:
                assert side.there(toks, namespace) == kept[0].of_pages, "what is said is there"
            # What has no ceiling has room, and has been written if nothing was in the way.
            if namespace == "c" and now_s - self.troubled_s > QUIET_S:
                assert kept
                assert kept[0].pages == kept[0].of_pages


@pytest.mark.parametrize("seed", range(*seed_range("0:12")))
def test_no_ceiling_is_exceeded_and_what_is_said_to_be_kept_is_there(seed):
    with repeatable(seed, __file__):
        walk = Walk(random.Random(seed))
        for _ in range(STEPS):
            walk.step()
            walk.check()
        for _ in range(int(2 * LIFETIME_S)):
            walk.world.pass_time(1.0)
            walk.check()
