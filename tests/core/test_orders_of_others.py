"""Orders to copy a lease that its process may not copy: of others, over, or not running."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvd.core.cache.lease import COPY
from kvd.errors import Code, Refusal
from kvd.wire import client
from tests.core.test_engine_copies import Engine
from tests.core.world import World

if TYPE_CHECKING:
    from collections.abc import Callable


def of_another_session(engine: Engine) -> int:
    return engine.side.attach("other")


def released(engine: Engine) -> int:
    engine.side.call(client.ReleaseLease, lease=engine.lease)
    return 1


def saving(engine: Engine) -> int:
    engine.world.hold_copies = True
    return retracted(engine)


def retracted(engine: Engine) -> int:
    engine.side.call(client.RetractLease, b"", lease=engine.lease)
    return 1


def condemned(engine: Engine) -> int:
    """What containment does of it that its engine can see."""
    engine.record.lost = Refusal(Code.CONDEMNED, "lease 1 was found broken", side="d")
    return 1


NOT_TO_BE_COPIED = [
    (of_another_session, Code.UNKNOWN_LEASE, "lease 1"),
    (released, Code.UNKNOWN_LEASE, "lease 1"),
    (saving, Code.WRONG_STATE, "wait until it is retracted"),
    (retracted, Code.WRONG_STATE, "resume it first"),
    (condemned, Code.CONDEMNED, "found broken"),
]


@pytest.mark.parametrize("is_save", [True, False], ids=["save", "load"])
@pytest.mark.parametrize(
    ("becomes", "code", "words"),
    NOT_TO_BE_COPIED,
    ids=[case[0].__name__ for case in NOT_TO_BE_COPIED],
)
def test_it_is_refused_and_holds_nothing(
    becomes: Callable[[Engine], int], code: Code, words: str, is_save: bool
) -> None:
    world = World()
    engine = Engine(world, world.d)
    engine.over(engine.save(0, 7))
    session = becomes(engine)

    order = engine.begins(2, 4) if is_save else engine.begins(0, 2, to_pages=False, upto_tokens=0)
    refusal = engine.side.copy_said(order, session=session)

    assert refusal is not None
    assert (refusal.code, words in refusal.message) == (code, True), refusal
    assert not list(engine.side.node.engine_copies)
    record = engine.side.node.leases.leases.get(engine.lease)
    assert record is None or COPY not in record.holders
