"""Consoles and a real daemon: looks are answered with frames, and cost little."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from kvd.client.admin import AdminClient
from kvd.daemon.admins import AdminPort
from kvd.daemon.reactor import Reactor
from kvd.errors import Code
from kvd.observe.bus import Bus
from kvd.wire import admin
from kvd.wire.codec import ADMIN_REPLIES, ADMIN_REQUESTS
from kvd.wire.console import EventQuery, Query, Table
from tests.core.world import World

CONSOLES = 20
FRAMES_PER_S = 10
LOOK_S = 0.001
"""The most that one may cost, the daemon's own beat included; it is some 0.15 ms."""


def table_of(frame: admin.Frame, at: int = 0) -> Table:
    return msgspec.msgpack.decode(frame.answers[at], type=Table)


async def test_a_look_shows_the_sessions_and_what_they_called(engines):
    await engines.d.lease(list(range(40)))
    asked = admin.Look(1, (Query("clients"),), EventQuery(0, limit=5))
    frame = engines.pair.decode.ask(asked, admin.Frame)
    table = table_of(frame)
    names = [column.name for column in table.columns]
    [mine] = [dict(zip(names, row.cells, strict=True)) for row in table.rows]

    assert (frame.vitals.node, frame.vitals.state, frame.vitals.clients) == ("d", "serving", 1)
    assert (mine["name"], mine["state"], mine["leases"]) == ("decode-engine", "alive", 1)
    assert mine["calls"] >= 1
    assert frame.vitals.lag_s >= 0.0
    assert frame.events[-1].seq == frame.upto


async def test_so_many_frames_come_as_were_asked_for_and_then_none(engines):
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(engines.pair.decode.admin)
    try:
        look = admin.Look(3, (Query("clients"),), frames=3, every_s=0.05)
        await socket.send(ADMIN_REQUESTS.encode(look))
        frames = [ADMIN_REPLIES.decode(await socket.recv()) for _ in range(3)]
        await socket.send(ADMIN_REQUESTS.encode(admin.Look(4)))
        last = ADMIN_REPLIES.decode(await socket.recv())
    finally:
        context.destroy(linger=0)

    assert [one.call for one in frames] == [3, 3, 3]
    tables = [table_of(one) for one in frames]
    assert [one.since for one in tables] == [0, *[one.revision for one in tables[:-1]]]
    assert last.call == 4


def test_a_table_that_is_not_there_costs_its_answer_only(engines):
    frame = engines.pair.decode.ask(
        admin.Look(1, (Query("nothing"), Query("clients"))), admin.Frame
    )

    assert "no table 'nothing'" in table_of(frame).trouble
    assert table_of(frame, 1).trouble == ""


def test_a_bug_of_the_desk_costs_that_look_and_is_reported():
    bugs: list[str] = []
    sent: list[list[bytes]] = []
    reactor = Reactor(
        World().d.node, Bus(), clock=lambda: 0.0, on_bug=lambda task, _: bugs.append(task)
    )

    def look(_: bytes, asked: admin.Look) -> bytes:
        raise KeyError(asked.call)

    port = AdminPort(reactor, Bus(), None, look, None, None)

    class Operator:
        send = staticmethod(sent.append)

    operator = Operator()
    port.welcome(operator)
    port.take(operator, [ADMIN_REQUESTS.encode(admin.Look(7))])

    [[reply]] = sent
    failed = ADMIN_REPLIES.decode(reply)
    assert isinstance(failed, admin.AdminFailed)
    assert (failed.call, failed.refusal.code) == (7, Code.INTERNAL)
    assert bugs == ["look"]


def cpu_s(pid: int) -> float:
    """What the process has used so far; the kernel counts in hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def test_twenty_consoles_are_answered_at_little_cost(engines):
    daemon = engines.pair.decode
    for start in range(0, 200, 40):
        await engines.d.lease(list(range(start, start + 40)))
    asked = admin.Look(1, (Query("clients"),), EventQuery(2**40))
    n_looks = CONSOLES * FRAMES_PER_S
    with AdminClient(daemon.admin) as client:
        before_s, begun_s = cpu_s(daemon.pid), time.monotonic()
        for _ in range(FRAMES_PER_S):
            due_s = time.monotonic() + 1.0 / FRAMES_PER_S
            for _ in range(CONSOLES):
                assert isinstance(client.request(asked), admin.Frame)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        spent_s, took_s = cpu_s(daemon.pid) - before_s, time.monotonic() - begun_s
    sys.stdout.write(f"{n_looks} looks in {took_s:.2f} s: {spent_s / n_looks * 1e6:.0f} us each\n")

    assert spent_s <= n_looks * LOOK_S
