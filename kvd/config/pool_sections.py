"""What a node holds and how it moves it: [pool], [radix], [admission], [transfer]."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class PoolSection(msgspec.Struct, frozen=True):
    """The KV pool: what a page holds, and how many there are."""

    name: Annotated[
        str,
        Meta(
            description="Name of the pool: what node.pool() takes.",
            extra={"rule": "1 to 64 letters, digits, '.', '_' or '-', beginning with no sign"},
        ),
    ] = "main"
    family: Annotated[
        Literal["mha"], Meta(description="What a page holds: mha is K and V per layer.")
    ] = "mha"
    device: Annotated[Literal["cpu"], Meta(description="Whose memory the pool lies in.")] = "cpu"
    order: Annotated[
        Literal["page_first", "layer_first"],
        Meta(
            description="What varies slowest in memory: page_first keeps all layers of a page "
            "together (fewest descriptors per transfer), layer_first all pages of a layer.",
        ),
    ] = "page_first"
    layers: Annotated[int, Meta(ge=1, le=1024, description="Layers of the model that have KV.")] = 4
    heads: Annotated[int, Meta(ge=1, le=4096, description="KV heads per layer.")] = 2
    head_dim: Annotated[
        int, Meta(ge=1, le=65536, description="Elements of one K head (and of V, unless v_dim).")
    ] = 64
    v_dim: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=65536,
                description="Elements of one V head. Left out: head_dim.",
                examples=[128],
            ),
        ]
        | None
    ) = None
    dtype: Annotated[
        Literal[
            "bfloat16",
            "float16",
            "float32",
            "float64",
            "float8_e4m3fn",
            "float8_e5m2",
            "int8",
            "uint8",
        ],
        Meta(description="Element type, by its torch name."),
    ] = "bfloat16"
    page_size: Annotated[
        int,
        Meta(
            ge=1,
            le=65536,
            description="Tokens per page: the unit of allocation, matching and transfer. The "
            "same on both sides of a handoff.",
        ),
    ] = 16
    pages: (
        Annotated[
            int,
            Meta(
                ge=2,
                le=2**31 - 1,
                description="Number of pages, the null page included. Excludes pool.size.",
                examples=[2048],
            ),
        ]
        | None
    ) = None
    size: (
        Annotated[
            str,
            Meta(
                description="Memory of the pool, from which the number of pages follows. "
                "Excludes pool.pages.",
                extra={"rule": "a whole number and a unit: KiB, MiB, GiB or TiB"},
            ),
        ]
        | None
    ) = "64MiB"
    saved_size: (
        Annotated[
            str,
            Meta(
                description="Host memory for the KV of retracted leases; 0KiB for none. Left out: "
                "an eighth of the pool, at most 1GiB.",
                extra={"rule": "a whole number and a unit: KiB, MiB, GiB or TiB"},
                examples=["512MiB"],
            ),
        ]
        | None
    ) = None
    backing: Annotated[
        Literal["anon"],
        Meta(description="Where the memory comes from: anon is a sealed memfd of the daemon."),
    ] = "anon"
    huge_pages: Annotated[
        Literal["collapse", "off"],
        Meta(description="collapse asks the kernel for 2 MiB pages: about twice the bandwidth."),
    ] = "collapse"


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
