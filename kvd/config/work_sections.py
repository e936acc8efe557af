"""What is done on a pool, and how bytes move: [cache], [engine], [radix], [admission], [transfer].

[engine] declares what no daemon can see: what the engine on this pool does. Nothing here changes by
it; it is there so that what cannot work is refused before an engine finds out.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class CacheSection(msgspec.Struct, frozen=True):
    """Whether KV is kept at all, and for whom."""

    mode: Annotated[
        Literal["radix", "off", "prefill-only"],
        Meta(
            description="radix keeps committed KV for later prompts; off matches and inserts "
            "nothing; prefill-only has no KV anywhere: tokens are counted, no byte is taken, and "
            "whatever would read, write, send or cache KV is refused. Never chosen by itself.",
        ),
    ] = "radix"


class EngineSection(msgspec.Struct, frozen=True):
    """What the engine on this pool does, declared so that what cannot work is refused at once."""

    workload: Annotated[
        Literal["generate", "embedding", "scoring"],
        Meta(description="generate decodes; embedding and scoring end with the prompt."),
    ] = "generate"
    chunk_tokens: Annotated[
        int,
        Meta(
            ge=-1,
            le=2**28,
            description="Tokens of a prompt that the engine computes at a time; -1 is the whole "
            "prompt.",
            extra={"rule": "-1, or a whole number from 1 to 268435456"},
        ),
    ] = -1
    mixed_chunk: Annotated[
        bool,
        Meta(description="Chunks of prompts are computed in one batch with decoding requests."),
    ] = False
    context_parallel: Annotated[
        int,
        Meta(ge=1, le=1024, description="Ranks that share the computation of one prompt."),
    ] = 1
    attention: Annotated[
        Literal["paged", "varlen"],
        Meta(
            description="paged attention reads K and V from the pool; varlen reads what was just "
            "computed.",
        ),
    ] = "paged"


class RadixSection(msgspec.Struct, frozen=True):
    """The prefix cache."""

    policy: Annotated[
        Literal["lru", "lfu", "fifo", "priority"],
        Meta(description="Which cached pages give way first when room is needed."),
    ] = "lru"


class AdmissionSection(msgspec.Struct, frozen=True):
    """The queue of requests that wait for room."""

    max_deadline_s: Annotated[
        float,
        Meta(
            ge=0.1,
            le=3600,
            description="Longest time that a lease or a receive may wait; a longer deadline_s "
            "is cut to it.",
        ),
    ] = 30.0
    max_queue: Annotated[
        int,
        Meta(ge=1, le=1_000_000, description="Requests that may wait; the next is refused."),
    ] = 1024
    overtakers: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description="Head of line: how many later requests that fit may go past one that does "
            "not, before it blocks them; 0 is strictly first come first served.",
        ),
    ] = 0
    drain_s: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="Longest time that a stop waits for the handoffs under way; what is left "
            "then is given up. Keep it 10 s below TimeoutStopSec of the unit.",
        ),
    ] = 20.0


class TransferSection(msgspec.Struct, frozen=True):
    """The transfer process, which moves the bytes."""

    transport: Annotated[
        Literal["nixl", "loopback"],
        Meta(description="How bytes travel between nodes.", extra={"rule": "nixl"}),
    ] = "nixl"
    integrity: Annotated[
        Literal["full", "sampled", "off"],
        Meta(
            description="Which received pages are compared with what was sent before anything is "
            "cached: all of them, the first, the last and one in 16, or none.",
        ),
    ] = "sampled"
    ucx: Annotated[
        dict[str, str],
        Meta(
            description="Environment of the transfer process: UCX_NET_DEVICES, UCX_TLS and "
            "the like, over kvd's own defaults.",
            extra={"rule": 'a table of UCX_NAME = "text"'},
            examples=[{"UCX_NET_DEVICES": "eth0"}],
        ),
    ] = {}
    stall_s: Annotated[
        float,
        Meta(
            ge=0.5,
            le=600,
            description="Window in which a handoff with writes under way must move "
            "min_bytes_per_s; otherwise it fails as stalled. Progress is known per 16 MiB.",
        ),
    ] = 10.0
    min_bytes_per_s: Annotated[
        int,
        Meta(ge=0, le=2**40, description="The slowest rate that is progress, per handoff."),
    ] = 2**20
    silent_s: Annotated[
        float,
        Meta(
            ge=1,
            le=600,
            description="A transfer process whose loop does not answer for so long is killed and "
            "replaced; its handoffs are settled.",
        ),
    ] = 5.0
    fence_after_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description="Policy: a quarantine that lasts so long replaces the transfer process, "
            "which ends every transfer into this node; 0 leaves that to kvd fence.",
        ),
    ] = 0.0
