"""The wire between two network devices: a process that carries frames, slowly.

    python -m tests.fault.shuttle TAP TAP COMMANDS       (descriptors that it inherits)

Each direction is one FIFO of ``rate`` bytes a second: nothing is lost, and nothing overtakes
anything, but for control traffic, which an order lets pass at once, or holds back. While the wire
is cut, frames that enter it are lost; those inside still arrive. It runs until nobody commands it
any more, and answers every command with what it has seen, by the clock that all processes share.
"""

from __future__ import annotations

import enum
import os
import selectors
import socket
import sys
import time
from collections import deque

import msgspec

PEERS_PORT = 7402
FRAMES_A_TURN = 64
MOST_FRAME_BYTES = 65_536
CATCH_UP_S = 0.004
"""How much of its rate a wire that was late makes good at once."""

_FIN, _SYN, _RST = 1, 2, 4


class Order(enum.Enum):
    """Where control traffic goes."""

    AHEAD = "control ahead"
    BEHIND = "control behind"
    """Through the same FIFO as the data."""
    DELAYED = "control delayed"
    """Past the data, but ``delay_s`` later than it was sent."""


class Command(msgspec.Struct, frozen=True):
    """How to carry from now on; everything is said each time."""

    rate: float
    order: Order = Order.AHEAD
    delay_s: float = 0.0
    is_cut: bool = False


class Flow(msgspec.Struct):
    """What one connection has carried one way, as far as it has been delivered."""

    carried_bytes: int = 0
    last_s: float = 0.0
    is_over: bool = False
    """Whether an end of it, of either side, has been delivered."""


class Seen(msgspec.Struct, frozen=True):
    """Data by direction and ports, ``0 4711 5812``; ``waiting_bytes``: inside, each way."""

    flows: dict[str, Flow]
    waiting_bytes: tuple[int, int]


class Frame(msgspec.Struct, frozen=True):
    """One frame inside; ``ports`` is empty where it is no TCP."""

    octets: bytes
    ports: tuple[int, int] | None
    payload_bytes: int
    flags: int

    @property
    def is_control(self) -> bool:
        """Whether it is anything else than the bytes of a transfer."""
        return self.ports is None or PEERS_PORT in self.ports


def read_frame(octets: bytes) -> Frame:
    """What matters of an Ethernet frame."""
    if octets[12:14] != b"\x08\x00" or octets[23] != socket.IPPROTO_TCP:
        return Frame(octets, None, 0, 0)
    tcp = 14 + (octets[14] & 15) * 4
    ports = int.from_bytes(octets[tcp : tcp + 2]), int.from_bytes(octets[tcp + 2 : tcp + 4])
    ends = 14 + int.from_bytes(octets[16:18])
    payload_bytes = ends - tcp - (octets[tcp + 12] >> 4) * 4
    return Frame(octets, ports, payload_bytes, octets[tcp + 13])


class Lane:
    """One direction: a FIFO at a rate, and beside it control traffic that is held back."""

    def __init__(self, way: int, into: int) -> None:
        self.way = way
        self._into = into
        self._waiting: deque[Frame] = deque()
        self._held: deque[tuple[float, Frame]] = deque()
        self._free_s = 0.0
        self.waiting_bytes = 0

    def take(self, frame: Frame, how: Command, now_s: float) -> bool:
        """Put it where it waits; whether it has to be delivered at once instead."""
        if frame.is_control and how.order is Order.AHEAD:
            return True
        if frame.is_control and how.order is Order.DELAYED:
            self._held.append((now_s + how.delay_s, frame))
            return False
        self._waiting.append(frame)
        self.waiting_bytes += len(frame.octets)
        return False

    def due(self, rate: float, now_s: float) -> list[Frame]:
        """What leaves the wire now."""
        found = []
        while self._held and self._held[0][0] <= now_s:
            found.append(self._held.popleft()[1])
        self._free_s = max(self._free_s, now_s - CATCH_UP_S)
        while self._waiting and self._free_s <= now_s:
            frame = self._waiting.popleft()
            self.waiting_bytes -= len(frame.octets)
            self._free_s += len(frame.octets) / rate
            found.append(frame)
        return found

    def put(self, octets: bytes) -> None:
        """Into the device at the end."""
        try:
            os.write(self._into, octets)
        except OSError:  # its namespace is being deleted
            self._waiting.clear()

    def next_s(self) -> float | None:
        """When something leaves the wire, if something is inside."""
        times = [self._held[0][0]] if self._held else []
        if self._waiting:
            times.append(self._free_s)
        return min(times, default=None)


class Shuttle:
    """Both directions, and whoever commands."""

    def __init__(self, taps: tuple[int, int], commands: socket.socket) -> None:
        self._how = Command(1e9)
        self._flows: dict[tuple[int, int, int], Flow] = {}
        self._lanes = Lane(0, taps[1]), Lane(1, taps[0])
        self._commands = commands
        self._selector = selectors.DefaultSelector()
        for tap, lane in zip(taps, self._lanes, strict=True):
            os.set_blocking(tap, False)
            self._selector.register(tap, selectors.EVENT_READ, lane)
        self._selector.register(commands, selectors.EVENT_READ, None)

    def run(self) -> None:
        """Until the other end of the commands is closed."""
        while True:
            for key, _ in self._selector.select(self._rest_s()):
                if key.data is not None:
                    self._drain(key.fd, key.data)
                elif not self._obey():
                    return
            now_s = time.monotonic()
            for lane in self._lanes:
                for frame in lane.due(self._how.rate, now_s):
                    self._deliver(lane, frame, now_s)

    def _rest_s(self) -> float | None:
        times = [at_s for lane in self._lanes if (at_s := lane.next_s()) is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _obey(self) -> bool:
        line = self._commands.recv(4096)
        if not line:
            return False
        if len(line) > 1:
            self._how = _COMMANDS.decode(line)
        flows = {" ".join(map(str, name)): flow for name, flow in self._flows.items()}
        waiting = self._lanes[0].waiting_bytes, self._lanes[1].waiting_bytes
        self._commands.send(msgspec.json.encode(Seen(flows, waiting)))
        return True

    def _drain(self, tap: int, lane: Lane) -> None:
        now_s = time.monotonic()
        for _ in range(FRAMES_A_TURN):
            try:
                octets = os.read(tap, MOST_FRAME_BYTES)
            except BlockingIOError:
                return
            except OSError:  # its namespace is being deleted
                self._selector.unregister(tap)
                return
            frame = read_frame(octets)
            if not self._how.is_cut and lane.take(frame, self._how, now_s):
                self._deliver(lane, frame, now_s)

    def _deliver(self, lane: Lane, frame: Frame, now_s: float) -> None:
        lane.put(frame.octets)
        if frame.is_control:
            return
        assert frame.ports is not None
        name = (lane.way, *frame.ports)
        flow = self._flows.setdefault(name, Flow())
        if frame.flags & _SYN:  # the same ports as a connection of before
            flow = self._flows[name] = Flow()
        if frame.payload_bytes:
            flow.carried_bytes += frame.payload_bytes
            flow.last_s = now_s
        if frame.flags & (_FIN | _RST):
            flow.is_over = True
            if frame.flags & _RST:
                self._flows.setdefault((1 - lane.way, *frame.ports[::-1]), Flow()).is_over = True


_COMMANDS = msgspec.json.Decoder(Command)


if __name__ == "__main__":
    first, second, third = map(int, sys.argv[1:])
    Shuttle((first, second), socket.socket(fileno=third)).run()
