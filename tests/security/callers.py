"""Who dials a daemon's port for peers: with a key, with another's, with none."""

from __future__ import annotations

import contextlib
import itertools
import time
import urllib.request

import msgspec
import zmq

from kvd.cli.doctor.peers import be_client
from kvd.client.admin import AdminClient
from kvd.core.layout.spec import PoolSpec, fingerprint
from kvd.sockets import open_dealer
from kvd.wire import admin, peer
from kvd.wire.codec import PEER_MESSAGES

ANSWER_MS = 10_000
EVENT_S = 10.0
QUIET_MS = 100
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_lives = itertools.count(1)


def info(daemon):
    """What the daemon's /info says."""
    with urllib.request.urlopen(f"http://127.0.0.1:{daemon.http_port}/info") as page:
        return msgspec.json.decode(page.read())


class Caller:
    """A DEALER to a daemon's peers.listen; ``pair`` None speaks without encryption."""

    def __init__(self, daemon, pair=None, server=""):
        self._context = zmq.Context()
        self._socket = open_dealer(self._context)
        if pair is not None:
            be_client(self._socket, pair, server)
        self._monitor = self._socket.get_monitor_socket(
            _FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        about = info(daemon)
        self._socket.connect(daemon.peers)
        self.target = about["incarnation"]
        self.source = f"{next(_lives):032x}"
        self._layout = fingerprint(msgspec.convert(about["pool"], PoolSpec))

    def hello(self, name, source=""):
        """A sound Hello under this name."""
        return peer.Hello(source or self.source, "", name, self._layout, 1, b"x", 2**20, 2**16)

    def tell(self, message):
        self.say(PEER_MESSAGES.encode(message))

    def say(self, *frames):
        """Not waiting: libzmq has nowhere to put it once it has given the connection up."""
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    def hears(self, kind):
        """The next message of a kind."""
        deadline_s = time.monotonic() + ANSWER_MS / 1e3
        while time.monotonic() < deadline_s and self._socket.poll(ANSWER_MS):
            message = PEER_MESSAGES.decode(self._socket.recv())
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind}")

    def hears_nothing(self):
        return not self._socket.poll(QUIET_MS)

    def handshake(self):
        """What became of its connection: the next of FAILED..., SUCCEEDED, DISCONNECTED."""
        assert self._monitor.poll(ANSWER_MS), "nothing became of it"
        event = int.from_bytes(self._monitor.recv_multipart()[0][:2], "little")
        return zmq.Event(event).name.removeprefix("HANDSHAKE_")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()


def event(daemon, kind, after=0, **fields):
    """The first event of a kind after a number, with these fields; waits for it."""
    deadline_s = time.monotonic() + EVENT_S
    with AdminClient(daemon.admin) as client:
        while time.monotonic() < deadline_s:
            page = client.request(admin.ListEvents(1, after, 1.0), timeout_s=EVENT_S)
            assert isinstance(page, admin.EventPage)
            for one in page.events:
                after = one.seq
                wanted = {name: getattr(one, name) for name in fields} if type(one) is kind else {}
                if type(one) is kind and wanted == fields:
                    return one
    raise AssertionError(f"no {kind.__name__} with {fields} within {EVENT_S} s")
