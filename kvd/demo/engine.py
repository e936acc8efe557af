"""An engine process of the demo: ``python -m kvd.demo.engine NAME``, driven over standard streams.

Which role it plays follows from what it is asked: ``Prefill``, ``Decode`` or ``Generate``; the name
is for whoever lists processes. It ends when its standard input does, so it cannot outlive the demo.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, BinaryIO, assert_never

import torch
import transformers

from kvd.client import connect_sync
from kvd.demo.decode import DecodeEngine
from kvd.demo.encoder import EncoderEngine
from kvd.demo.messages import (
    Connect,
    Connected,
    ConnectEncoder,
    Decode,
    Embed,
    Failed,
    Generate,
    Prefill,
    Reply,
    Request,
    Start,
    Started,
    frame,
    read_request,
)
from kvd.demo.models import ARCHITECTURES, ENCODERS, build_model, weight_digest
from kvd.demo.prefill import PrefillEngine
from kvd.demo.reference import generate
from kvd.errors import KvdError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvd.demo.layout import Shape


class Engine:
    """A model, and both sides of a handoff once it has been told where its daemon is."""

    def __init__(self, model: PreTrainedModel, shape: Shape) -> None:
        self._model = model
        self._shape = shape
        self._sides: tuple[PrefillEngine, DecodeEngine] | None = None

    def answer(self, request: Request) -> Reply:
        """Do what ``request`` asks."""
        match request:
            case Start():
                return Failed("the model was built already")
            case Connect(endpoint=endpoint, name=name):
                node = connect_sync(endpoint, name=name)
                self._sides = (
                    PrefillEngine(self._model, self._shape, node),
                    DecodeEngine(self._model, self._shape, node),
                )
                return Connected()
            case Generate():
                return generate(self._model, request)
            case Prefill():
                return self._attached()[0].prefill(request)
            case Decode():
                return self._attached()[1].decode(request)
            case ConnectEncoder() | Embed():
                return Failed("only an encoder embeds")
            case _:
                assert_never(request)

    def _attached(self) -> tuple[PrefillEngine, DecodeEngine]:
        """Both sides."""
        assert self._sides is not None, "the demo connects an engine before it uses it"
        return self._sides


def start(order: Start) -> tuple[Engine | EncoderEngine, Started]:
    """Build the model of ``order``."""
    engine: Engine | EncoderEngine
    if order.model in ENCODERS:
        model = build_model(ENCODERS[order.model], seed=order.seed, dtype=order.dtype)
        engine = EncoderEngine(model)
    else:
        architecture = ARCHITECTURES[order.model]
        model = build_model(architecture, seed=order.seed, dtype=order.dtype)
        engine = Engine(model, architecture.shape)
    return engine, Started(weight_digest(model), str(torch.__version__), transformers.__version__)


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until there are no more."""
    torch.set_num_threads(1)
    order = read_request(requests)
    if order is None:
        return
    assert isinstance(order, Start), f"the first request is Start, not {order}"
    engine, started = start(order)
    _send(replies, started)
    while (request := read_request(requests)) is not None:
        try:
            reply = engine.answer(request)
        except KvdError as refusal:
            reply = Failed(str(refusal))
        _send(replies, reply)


def _send(replies: BinaryIO, reply: Reply) -> None:
    """Write one answer, now."""
    replies.write(frame(reply))
    replies.flush()


def main() -> None:
    """Serve on the standard streams; whatever libraries print goes to the standard error."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
