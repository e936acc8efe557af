"""What the late bytes' campaign believes of its wire."""

from __future__ import annotations

import contextlib
import hashlib
import struct
import subprocess
import sys
import time

import pytest

from tests.fault.shuttle import PEERS_PORT, Command, Lane, Order, read_frame
from tests.fault.slow_link import slow_link
from tests.support.netns import Namespace, NoNamespaces

CONTROL = PEERS_PORT
RATE = 1000.0
HEADERS_BYTES = 62
READER = """
import hashlib, socket, sys
with socket.create_server((sys.argv[1], 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    stream, _ = listener.accept()
    got = hashlib.blake2b()
    while data := stream.recv(65536):
        got.update(data)
    print(got.hexdigest(), end="")
"""


def _frame(port: int, payload: bytes = b"") -> bytes:
    """Ethernet, IPv4 with one option, TCP with one option."""
    tcp = struct.pack("!HHIIBBHHH", port, 40_000, 0, 0, 6 << 4, 0x10, 0, 0, 0) + bytes(4)
    ip = struct.pack("!BBHHHBBH", 0x46, 0, 24 + len(tcp) + len(payload), 0, 0, 64, 6, 0)
    return bytes(12) + b"\x08\x00" + ip + bytes(12) + tcp + payload


def _out(order: Order) -> list[str]:
    """How data, control and data leave a lane that they have entered one after the other."""
    lane, how, out = Lane(0, -1), Command(RATE, order, delay_s=5.0), []
    for name, port in (("first", 9), ("control", CONTROL), ("second", 9)):
        if lane.take(read_frame(_frame(port, name.encode())), how, 100.0):
            out.append(name)
    left = [frame for second in range(7) for frame in lane.due(RATE, 100.0 + second)]
    return out + [frame.octets[HEADERS_BYTES:].decode() for frame in left]


def test_a_frame_is_read_with_its_options() -> None:
    frame = read_frame(_frame(CONTROL, b"seven b") + b"padding")

    assert (frame.ports, frame.payload_bytes, frame.is_control) == ((CONTROL, 40_000), 7, True)
    assert not read_frame(_frame(CONTROL + 1)).is_control
    assert read_frame(bytes(12) + b"\x08\x06" + bytes(28)).is_control


@pytest.mark.parametrize(
    ("order", "left"),
    [
        (Order.AHEAD, ["control", "first", "second"]),
        (Order.BEHIND, ["first", "control", "second"]),
        (Order.DELAYED, ["first", "second", "control"]),
    ],
)
def test_control_passes_the_data_only_where_the_order_says_so(
    order: Order, left: list[str]
) -> None:
    assert _out(order) == left


def test_data_leaves_at_the_rate_and_in_order() -> None:
    lane = Lane(0, -1)
    frames = [read_frame(_frame(9, bytes([number]) * 38)) for number in range(10)]  # of 100 bytes
    for frame in frames:
        lane.take(frame, Command(RATE), 50.0)

    early = lane.due(RATE, 50.0)
    between = [lane.due(RATE, 50.0 + tenths / 10) for tenths in range(1, 10)]

    assert [early, *between] == [[frame] for frame in frames]
    assert lane.waiting_bytes == 0


def test_a_stream_over_a_slow_link_arrives_whole_and_not_before_its_time() -> None:
    rate, sent = 4e6, bytes(range(256)) * 8192
    with contextlib.ExitStack() as stack:
        try:
            link = stack.enter_context(slow_link(("p", "d")))
        except NoNamespaces as why:
            pytest.skip(f"a slow link needs two network namespaces: {why}")
        link.carry(Command(rate))
        here, there = link.place("p"), link.place("d")
        reader = subprocess.Popen(
            [*there.prefix, sys.executable, "-c", READER, there.host], stdout=subprocess.PIPE
        )
        assert reader.stdout is not None
        port = int(reader.stdout.readline())
        began_s = time.monotonic()
        with Namespace(link.namespaces["p"], here.host).connect(there.host, port) as stream:
            stream.sendall(sent)
        digest = reader.communicate(timeout=60)[0].decode()
        took_s = time.monotonic() - began_s
        flows = link.look().flows

    assert digest == hashlib.blake2b(sent).hexdigest()
    assert took_s > 0.9 * len(sent) / rate
    (flow,) = [flow for name, flow in flows.items() if name.startswith("0 ")]
    assert flow.is_over
    assert flow.carried_bytes >= len(sent)
