"""The bus: takers hear everything in order, a late reader hears what it lost."""

from __future__ import annotations

from kvd.observe.bus import RING_EVENTS, Bus
from kvd.wire.events import Event, Flushed


def flushed(seq: int) -> Flushed:
    return Flushed(seq, 0.0, freed_pages=1, kept_pages=0)


def test_bus_gives_a_taker_every_event_in_order() -> None:
    bus = Bus()
    taken: list[Event] = []
    bus.subscribe(taken.append)

    for seq in (1, 2, 3):
        bus.publish([flushed(seq)])

    assert taken == [flushed(1), flushed(2), flushed(3)]


def test_bus_gives_a_late_reader_what_came_after() -> None:
    bus = Bus()
    for seq in (1, 2, 3):
        bus.publish([flushed(seq)])

    assert bus.after(1) == (0, (flushed(2), flushed(3)))
    assert bus.after(3) == (0, ())
    assert bus.after(-(2**63))[1] == bus.after(0)[1]


def test_bus_counts_what_a_late_reader_lost() -> None:
    bus = Bus()
    for seq in range(1, RING_EVENTS + 11):
        bus.publish([flushed(seq)])

    lost, events = bus.after(4)

    assert lost == 6
    assert [event.seq for event in events] == list(range(11, RING_EVENTS + 11))


def test_bus_wakes_a_waiting_reader_once() -> None:
    bus, woken = Bus(), []

    def wake() -> None:
        woken.append(1)

    bus.wake_on_next(wake)
    bus.publish([flushed(1)])
    bus.publish([flushed(2)])

    assert woken == [1]


def test_bus_does_not_wake_who_stopped_waiting() -> None:
    bus, woken = Bus(), []

    def wake() -> None:
        woken.append(1)

    bus.wake_on_next(wake)
    bus.stop_waking(wake)
    bus.publish([flushed(1)])

    assert woken == []
