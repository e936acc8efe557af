"""What the demo and its engine processes say to each other, and the frames it travels in.

The demo is the parent: it writes to a child's standard input and reads from its standard output.
One frame is four bytes of length, big-endian, and one msgpack message. A request gets exactly one
answer; ``EngineFailed`` is one to any of them. Logits are raw little-endian float64, (rows,
vocabulary).
"""

from __future__ import annotations

import enum
from typing import BinaryIO

import msgspec

from kvd.demo.division import ALONE, Division, SentPages
from kvd.demo.layout import PoolPart

LENGTH_BYTES = 4
DEADLINE_S = 30.0
"""Of each half of a handoff."""

ANSWER_TOKENS = 16

CHUNK_TOKENS = 64
"""Tokens of one prefill step: KV of a chunk travels while the next one is computed."""

STEP_TOKENS = 8
"""Tokens decoded between two slides: window pages are mapped so far ahead."""


class StartEngine(msgspec.Struct, frozen=True, tag="start"):
    """Build the model, and be so many processes. Answer: ``Started``."""

    model: str
    seed: int
    dtype: str
    division: Division = ALONE


class ConnectEngine(msgspec.Struct, frozen=True, tag="connect"):
    """Attach to the daemons at ``endpoints``, one for each rank that has one, in their order.

    Answer: ``Connected``.
    """

    endpoints: tuple[str, ...]
    name: str


class PrefillPrompt(msgspec.Struct, frozen=True, tag="prefill"):
    """Compute the prompt and hand its KV over under ``room``. Answer: ``Prefilled``."""

    room: int
    tokens: tuple[int, ...]
    to: str


class DecodePrompt(msgspec.Struct, frozen=True, tag="decode"):
    """Receive the prompt's KV and go on from there. Answer: ``Decoded``.

    With ``damage`` one page of that part which crossed is overwritten first: the negative control.
    """

    room: int
    tokens: tuple[int, ...]
    sources: tuple[str, ...]
    damage: PoolPart | None = None


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """Do it all in this process, without kvd. Answer: ``Generated``."""

    tokens: tuple[int, ...]


class Keeping(enum.Enum):
    """What becomes of a batch's K and V; see ``encoder``."""

    COUNTED = "counted"
    WRITTEN = "written"
    READ_BACK = "read-back"
    ALONE = "alone"


class ConnectEncoder(msgspec.Struct, frozen=True, tag="connect-encoder"):
    """Attach to the daemon that counts and to the one with memory. Answer: ``Connected``."""

    counted_endpoint: str
    written_endpoint: str
    name: str


class Embed(msgspec.Struct, frozen=True, tag="embed"):
    """Embed a batch of texts. Answer: ``Embedded``.

    With ``damage`` a page is overwritten before it is read back: the negative control.
    """

    texts: tuple[tuple[int, ...], ...]
    keeping: Keeping
    damage: bool = False


Request = (
    StartEngine | ConnectEngine | PrefillPrompt | DecodePrompt | Generate | ConnectEncoder | Embed
)


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The model is there; ``weights`` is the digest of its parameters."""

    weights: str
    torch: str
    transformers: str


class Connected(msgspec.Struct, frozen=True, tag="connected"):
    """The pool is mapped."""


class Prefilled(msgspec.Struct, frozen=True, tag="prefilled"):
    """The handoff is over.

    ``prefix_tokens`` were in this node's own cache, ``computed_tokens`` were not (the last one is
    always computed). ``sent`` has the figures of each prefill daemon; ``peak_window_pages`` is the
    most that the lease had of those at once, ``slides`` how often it slid. ``handoff_s`` runs from
    the first page ready to be sent until the decode side's commit, ``tail_s`` only from the last
    one. Of several ranks with a daemon these are the figures of the slowest.
    """

    prefix_tokens: int
    computed_tokens: int
    decode_prefix_len: int
    sent: tuple[SentPages, ...]
    handoff_s: float
    tail_s: float
    logits: bytes
    peak_window_pages: int = 0
    slides: int = 0


class Decoded(msgspec.Struct, frozen=True, tag="decoded"):
    """The answer, its first token included, whose logits the prefill engine has.

    ``first_token_at_s`` is the monotonic clock of this host, the same in all processes.
    """

    tokens: tuple[int, ...]
    prefix_tokens: int
    first_token_at_s: float
    logits: bytes
    peak_window_pages: int = 0
    slides: int = 0


class Generated(msgspec.Struct, frozen=True, tag="generated"):
    """The answer of a single process."""

    tokens: tuple[int, ...]
    logits: bytes


class Embedded(msgspec.Struct, frozen=True, tag="embedded"):
    """The embeddings, (texts, hidden) as raw little-endian float64, and how long they took."""

    vectors: bytes
    took_s: float


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The request failed; ``error`` says why in one sentence."""

    error: str


Reply = Started | Connected | Prefilled | Decoded | Generated | Embedded | EngineFailed

_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS = msgspec.msgpack.Decoder(Request)
_REPLIES = msgspec.msgpack.Decoder(Reply)


class FirstToken(msgspec.Struct, frozen=True):
    """The aux of a handoff: what the prefill engine's last logits chose."""

    token: int
    logprob: float


def encode(message: Request | Reply) -> bytes:
    """One message."""
    return _ENCODER.encode(message)


def frame(message: Request | Reply) -> bytes:
    """One message with its length."""
    body = encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def read_request(stream: BinaryIO) -> Request | None:
    """The next request; None at the end, when the parent is gone."""
    header = stream.read(LENGTH_BYTES)
    if len(header) < LENGTH_BYTES:
        return None
    return decode_request(stream.read(int.from_bytes(header, "big")))


def decode_request(body: bytes) -> Request:
    """A request from the body of its frame."""
    request: Request = _REQUESTS.decode(body)
    return request


def decode_reply(body: bytes) -> Reply:
    """A reply from the body of its frame."""
    reply: Reply = _REPLIES.decode(body)
    return reply
