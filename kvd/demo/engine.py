"""An engine process of the demo: ``python -m kvd.demo.engine NAME``, driven over standard streams.

Which role it plays follows from what it is asked: ``Prefill``, ``Decode`` or ``Generate``; the name
is for whoever lists processes. How many processes it is it learns with its model; the first of them
speaks for all. It ends when its standard input does, so it cannot outlive the demo.
"""

from __future__ import annotations

import os
import sys
from typing import BinaryIO, Protocol

import torch
import transformers

from kvd.demo.encoder import EncoderEngine
from kvd.demo.group import fork
from kvd.demo.messages import Failed, Reply, Request, Start, Started, frame, read_request
from kvd.demo.models import ARCHITECTURES, ENCODERS, build_model, weight_digest
from kvd.demo.rank import spokesman
from kvd.errors import KvdError


class Engine(Protocol):
    """Answers the demo."""

    def answer(self, request: Request) -> Reply:
        """Do what ``request`` asks.

        Raises:
            KvdError: a daemon refused.
        """


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until there are no more."""
    torch.set_num_threads(1)
    order = read_request(requests)
    if order is None:
        return
    assert isinstance(order, Start), f"the first request is Start, not {order}"
    is_encoder = order.model in ENCODERS
    architecture = (ENCODERS if is_encoder else ARCHITECTURES)[order.model]
    model = build_model(architecture, seed=order.seed, dtype=order.dtype)
    started = Started(weight_digest(model), str(torch.__version__), transformers.__version__)
    if is_encoder:
        engine: Engine = EncoderEngine(model)
    else:
        group = fork(order.division.ranks)
        if group.rank:
            requests.close()
            replies.close()  # so that the demo hears when the first rank ends
        engine = spokesman(model, architecture.shape, order.division, group)
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
