"""How long a string and how large a number may be on the wire.

What lives here: the types of fields that a stranger fills. A value outside its type is refused by
the codec, before anything has looked at it. What must not: what a value means. So the bounds are
the widest that no code behind them can stumble over; whatever the core refuses with a sentence of
its own (a negative reserve, room 0, an unknown lease) still gets there.

A plain ``int`` is what MessagePack has, -2**63 to 2**64 - 1. It is used for a number that is only
looked up or compared (``room``, ``lease``, ``receive``, ``send``), so that whoever asks about an
impossible one is told that there is none.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvd.types import MAX_FRAME_BYTES

INT64 = 2**63 - 1

Call = Annotated[int, Meta(ge=0, le=INT64)]
"""Chosen by the caller; -1 is the daemon's, for a request whose own could not be read."""

Counter = Annotated[int, Meta(ge=0, le=INT64)]
"""Counts up from 0 or 1: handoffs, generations, pings, bytes."""

Figure = Annotated[int, Meta(ge=-INT64 - 1, le=INT64)]
"""A number that is computed with: sums of a few of them are numbers of the wire still."""

Priority = Annotated[int, Meta(ge=-(2**31), le=2**31)]

Name = Annotated[str, Meta(max_length=128)]
"""Of a node, a session, a component, a mode, an incarnation."""

MAX_SOURCES = 64
"""Daemons that one prompt may come from."""

MAX_PROMPTS = 4096
"""Prompts that one message forgets."""

NAMESPACE_CHARS = 256

Namespace = Annotated[str, Meta(max_length=NAMESPACE_CHARS)]

SessionKey = Annotated[str, Meta(max_length=256)]
"""What the processes of one engine share, drawn by their launcher; empty: none."""

MAX_REASON = 1024

Reason = Annotated[str, Meta(max_length=MAX_REASON)]
"""Why somebody gave up, in their words."""

Relayed = Annotated[str, Meta(max_length=4096)]
"""A reason as the other daemon hears it: another's words within its own sentence."""

Layout = Annotated[str, Meta(max_length=1024 * 1024)]
"""Names every component of a pool."""

Digest = Annotated[bytes, Meta(max_length=64)]

EventHandle = Annotated[bytes, Meta(max_length=64)]
"""The IPC handle of a CUDA event, 64 bytes; empty where there is none."""

MAX_PEER_BYTES = MAX_FRAME_BYTES
"""The longest message between daemons that is read, whatever the socket lets through.

The core refuses a handoff that would need a longer one before it begins: see
``kvd.core.handoff.message_sizes``.
"""

OLD_PEER_BYTES = 4 * 1024 * 1024
"""What a daemon reads that does not say."""

Checksums = Annotated[bytes, Meta(max_length=MAX_PEER_BYTES)]
"""Of the pages of one prompt, 8 bytes each: two million pages."""

PromptBytes = Annotated[bytes, Meta(max_length=MAX_PEER_BYTES)]
"""The tokens of a prompt."""

MAX_GRANTS = 256
"""Components of one pool that travel: far above any family."""

MAX_METADATA_BYTES = 64 * 1024
"""Of one receiving agent: those of NIXL have 170 to 500, and 44 more for each region."""

Metadata = Annotated[bytes, Meta(max_length=MAX_METADATA_BYTES)]

MAX_MESSAGE = 4096
"""Characters of a refusal that another daemon sent, and of each text among its numbers."""
