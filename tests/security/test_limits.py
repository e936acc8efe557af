"""What is bounded before it is read, and what never leaves the socket that it belongs on."""

from __future__ import annotations

import base64
import urllib.request
from pathlib import Path

import msgspec

from kvd.wire import peer
from tests.security.callers import Caller

TOO_LONG_BYTES = 64 * 2**20
"""Above limits.max_frame_bytes, which is 16 MiB."""
NOISE_BYTES = 8 * 2**20


def peak_bytes(daemon):
    """The most memory of its own that a daemon ever had."""
    (line,) = [
        line
        for line in Path(f"/proc/{daemon.pid}/status").read_text("ascii").splitlines()
        if line.startswith("VmHWM")
    ]
    return 1024 * int(line.split()[1])


def test_a_frame_above_the_limit_is_dropped_before_there_is_memory_for_it(keyed):
    daemon = keyed.pair.prefill
    with Caller(daemon, keyed.mallory, keyed.server) as mallory:
        mallory.tell(mallory.hello("mallory"))
        mallory.hears(peer.Hello)
        assert mallory.handshake() == "SUCCEEDED"
        before = peak_bytes(daemon)
        mallory.say(bytes(TOO_LONG_BYTES))
        assert mallory.handshake() == "DISCONNECTED"
    assert peak_bytes(daemon) < before + NOISE_BYTES
    assert {one.name: one.state for one in daemon.snapshot().peers}["d"] == "up"


def test_transport_metadata_is_on_the_socket_for_peers_and_on_no_other(keyed):
    daemon = keyed.pair.prefill
    with Caller(daemon, keyed.mallory, keyed.server) as mallory:
        mallory.tell(mallory.hello("mallory"))
        metadata = mallory.hears(peer.Hello).metadata
    assert len(metadata) > 100

    text = base64.b64encode(metadata).decode()
    for name in ("info", "status", "metrics"):
        with urllib.request.urlopen(f"http://127.0.0.1:{daemon.http_port}/{name}") as page:
            assert text not in page.read().decode()
    assert text not in msgspec.json.encode(daemon.snapshot()).decode()
