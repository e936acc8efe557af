"""What a process tells its daemon of late marks; and that a mark which comes costs no word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvd.client import Code, KvdError
from kvd.client.mover import late_marks
from kvd.client.mover.host_lane import HostLane
from kvd.wire.attach import CopyBegins, CopyEnds, CopyWaits
from tests.support.copies import WordsDaemon, raw_pool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.client import PendingCopy

BYTES = 4096


class Late:
    """Blocks of host memory behind marks that come when the test says so."""

    def __init__(self, patch: pytest.MonkeyPatch, *, hears_waits: bool = True) -> None:
        self.has_come = False
        patch.setattr(HostLane, "has_come", lambda *_: self.has_come)
        self.daemon = WordsDaemon(raw_pool(layers=1), hears_waits=hears_waits)
        self.own = np.ones((20, BYTES), np.uint8)

    def save(self, block: int, **given: Any) -> PendingCopy:
        blocks = self.daemon.worker.blocks({0: self.own}, block_size=16, **given)
        return blocks.begin_save(
            self.daemon.key(), {"kv": [block]}, pages={"kv": [block + 1]}, first_page=block
        )

    def said(self) -> list[type]:
        return [type(word) for word in self.daemon.said]


@pytest.fixture(params=[True])
def late(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Late]:
    made = Late(monkeypatch, hears_waits=request.param)
    yield made
    made.has_come = True
    made.daemon.close()


def test_a_mark_that_comes_soon_costs_no_word(late: Late) -> None:
    save = late.save(3)
    with pytest.raises(KvdError, match="is waiting after"):
        save.result(late_marks.LATE_S / 5)
    late.has_come = True
    save.result(5)
    assert late.said() == [CopyBegins, CopyEnds]
    assert [word.waited for word in late.daemon.said if isinstance(word, CopyBegins)] == [0]


def test_one_that_is_late_is_told_once_with_its_bound(
    late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_marks, "LATE_S", 0.05)
    save = late.save(3)
    late.daemon.until(lambda: late.daemon.said)
    with pytest.raises(KvdError, match="is waiting after"):
        save.result(0.1)
    (told,) = late.daemon.said
    assert isinstance(told, CopyWaits)
    assert (told.lease, told.to_pages, told.n_pages, told.device) == (1, True, 1, "")
    assert 50_000 <= told.waited_us < 5_000_000
    assert told.waited_us + told.left_us == pytest.approx(60e6, abs=10)

    late.has_come = True
    save.result(5)
    assert late.said() == [CopyWaits, CopyBegins, CopyEnds]
    assert not late.daemon.waits, "what begins is not said to be over"


@pytest.mark.parametrize("end", ["cancelled", "given up"])
def test_the_end_of_one_that_never_began_is_told(
    late: Late, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(late_marks, "LATE_S", 0.05)
    save = late.save(3, mark_within_s=60 if end == "cancelled" else 0.3)
    late.daemon.until(lambda: late.daemon.waits)
    if end == "cancelled":
        save.cancel()
    with pytest.raises(KvdError) as refused:
        save.result(5)
    expected = Code.CANCELLED if end == "cancelled" else Code.DEADLINE
    assert refused.value.code == expected.value
    late.daemon.until(lambda: not late.daemon.waits)
    _, ends = late.daemon.said
    assert isinstance(ends, CopyEnds)
    assert (ends.is_done, ends.n_bytes) == (False, 0)
    assert ends.why
    assert ends.waited_us >= 50_000


@pytest.mark.parametrize("late", [False], indirect=True)
def test_an_older_daemon_hears_none_of_it(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_marks, "LATE_S", 0.0)
    save = late.save(3)
    with pytest.raises(KvdError, match="is waiting after"):
        save.result(0.1)
    late.has_come = True
    save.result(5)
    assert late.said() == [CopyBegins, CopyEnds]


def test_many_are_told_in_bounds_and_all_end(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each of thousands is given up: what the daemon answers never fills the socket."""
    monkeypatch.setattr(late_marks, "LATE_S", 0.0)
    monkeypatch.setattr(late_marks, "MOST_TOLD", 5)
    blocks = late.daemon.worker.blocks({0: late.own}, block_size=16)
    key = late.daemon.key()
    for _ in range(60):
        orders = [
            blocks.begin_save(key, {"kv": [n]}, pages={"kv": [n + 1]}, first_page=n)
            for n in range(20)
        ]
        late.daemon.until(lambda: late.daemon.waits)
        assert len(late.daemon.waits) <= 5
        for order in orders:
            order.cancel()
        for order in orders:
            with pytest.raises(KvdError, match="cancelled"):
                order.result(5)
    late.daemon.until(lambda: not late.daemon.waits)
    assert CopyBegins not in late.said()
    assert len(late.daemon.worker._words._open) < 10, "answers that nobody has read"
