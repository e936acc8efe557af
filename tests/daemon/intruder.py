"""Who sends a daemon what it should not: sessions, operators and peers without a library."""

from __future__ import annotations

import itertools
import time
import urllib.request
from collections import deque

import msgspec
import numpy as np
import zmq

from kvd.client.blocking import attach
from kvd.core.handoff.offer import prompt_digest
from kvd.core.layout.spec import PoolSpec, fingerprint
from kvd.sockets import open_dealer
from kvd.types import Tokens, pack_ids
from kvd.wire import client, peer
from kvd.wire.attach import Attach
from kvd.wire.codec import CLIENT_REPLIES, CLIENT_REQUESTS, PEER_MESSAGES
from tests.daemon.kv import tokens_of
from tests.support.replies import each

SEED = 20_240
ANSWER_MS = 5_000
TOO_LONG = 17 * 2**20
"""Above limits.max_frame_bytes."""
TOKENS = tokens_of(100, seed=SEED).tobytes()


class Wire:
    """A DEALER that says what it likes."""

    def __init__(self, endpoint, codec, routing_id=None):
        self._context = zmq.Context()
        self._socket = open_dealer(self._context, routing_id=routing_id, max_frame_bytes=64 * 2**20)
        self._socket.connect(endpoint)
        self._codec = codec
        self._heard = deque()
        self.n_messages = 0

    def say(self, *frames):
        self._socket.send_multipart(frames)

    def hear(self):
        """The next answer; None when there is none."""
        if not self._heard:
            if not self._socket.poll(ANSWER_MS):
                return None
            self.n_messages += 1
            self._heard.extend(each(self._codec.decode(self._socket.recv_multipart()[0])))
        return self._heard.popleft()

    def asked(self, *frames):
        self.say(*frames)
        return self.hear()

    def close(self):
        self._socket.close(linger=0)
        self._context.term()


class RawSession(Wire):
    """A session without a client library."""

    def __init__(self, daemon):
        self.attachment = attach(daemon.client, Attach("raw"))
        super().__init__(daemon.client, CLIENT_REPLIES, self.attachment.attached.token)

    def request(self, message, *tokens):
        """The code of the refusal, or the answer."""
        answer = self.asked(CLIENT_REQUESTS.encode(message), *tokens)
        if isinstance(answer, client.Failed):
            assert answer.call == message.call
            return answer.refusal.code
        return answer

    def close(self):
        super().close()
        self.attachment.close()


def mutants(valid, count, seed=SEED):
    """Frames that are nearly right: cut, with flipped bits, with other bytes; and random ones."""
    source = np.random.default_rng(seed)
    for number in range(count):
        whole = bytearray(valid[number % len(valid)])
        match number % 4:
            case 0:
                yield bytes(whole[: source.integers(0, len(whole))])
            case 1:
                for at in source.integers(0, len(whole), 3):
                    whole[at] ^= 1 << int(source.integers(0, 8))
                yield bytes(whole)
            case 2:
                at = int(source.integers(0, len(whole)))
                yield bytes(whole[:at]) + source.bytes(8) + bytes(whole[at:])
            case _:
                yield source.bytes(int(source.integers(0, 300)))


class Stranger(Wire):
    """A node ``mallory`` that dials the prefill daemon."""

    lives = itertools.count(1)

    def __init__(self, daemon, name="mallory"):
        super().__init__(daemon.peers, PEER_MESSAGES)
        with urllib.request.urlopen(f"http://127.0.0.1:{daemon.http_port}/info") as page:
            info = msgspec.json.decode(page.read())
        self.target = info["incarnation"]
        self.source = f"{next(self.lives):032x}"
        spec = msgspec.convert(info["pool"], PoolSpec)
        self.greeting = peer.Hello(
            self.source, "", name, fingerprint(spec), 1, b"no metadata", 2**20, 2**16
        )

    def tell(self, message):
        self.say(PEER_MESSAGES.encode(message))

    def hears(self, *kinds):
        """The next message of these kinds."""
        deadline_s = time.monotonic() + ANSWER_MS / 1e3
        while time.monotonic() < deadline_s and (message := self.hear()) is not None:
            if isinstance(message, kinds):
                return message
        raise AssertionError(f"no {kinds}")

    def greet(self):
        self.tell(self.greeting)
        self.hears(peer.Hello)

    def close_room(self, handoff):
        """Its Settled is not repeated any more."""
        self.tell(peer.Closed(self.source, self.target, handoff, peer.ReceiveOutcome.ABORTED))

    def offer(self, **changes):
        usual = {
            "source": self.source,
            "target": self.target,
            "handoff": 1,
            "room": 1,
            "generation": 1,
            "prompt_tokens": 100,
            "decode_prefix_len": 0,
            "digest": prompt_digest(Tokens(TOKENS), ""),
            "grants": (peer.Grant("kv", 0, 100, pack_ids([1, 2, 3, 4, 5, 6, 7])),),
            "deadline_s": 1.0,
        }
        self.tell(peer.Offer(**{**usual, **changes}))
