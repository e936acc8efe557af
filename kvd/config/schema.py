"""Every key of kvd.toml: its type, its default, one line of documentation and its bounds.

A section is a frozen struct and a key is a field of it; nothing is configurable that has no field
here. ``keys`` reads these structs to check values and to explain them; ``rules`` holds what bounds
cannot say. A key that may be left out without a value of its own is ``| None``, and its
documentation says what then happens.

What must not be here: parsing, files, the environment.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvd.config.origin import Origin


class NodeSection(msgspec.Struct, frozen=True):
    """Who this daemon is."""

    name: Annotated[
        str,
        Meta(
            description="Name of this node: what peers, leases and events call it. "
            "Default: the host name.",
            extra={"rule": "1 to 64 letters, digits, '.', '_' or '-', beginning with no sign"},
        ),
    ]


class SocketsSection(msgspec.Struct, frozen=True):
    """Unix sockets for engines and operators on this host."""

    client: Annotated[
        str,
        Meta(
            description="Where engines connect; attach.sock lies beside it. Default: client.sock "
            "in /run/kvd (root) or $XDG_RUNTIME_DIR/kvd.",
            extra={"rule": "ipc:// and an absolute path of at most 100 bytes"},
        ),
    ]
    admin: Annotated[
        str,
        Meta(
            description="Where consoles and the command line connect. Default: admin.sock beside "
            "the default client socket.",
            extra={"rule": "ipc:// and an absolute path of at most 100 bytes"},
        ),
    ]
    mode: Annotated[
        str,
        Meta(
            description="File mode of the sockets, in octal.",
            extra={"rule": "four octal digits that let the owner read and write, like '0660'"},
        ),
    ] = "0660"
    group: (
        Annotated[
            str,
            Meta(
                description="Group that owns the sockets. Left out: kvd if the daemon runs as "
                "root and that group exists, else the daemon's own group.",
                extra={"rule": "the name of a group of this host"},
                examples=["kvd"],
            ),
        ]
        | None
    ) = None


class PeersSection(msgspec.Struct, frozen=True):
    """Other kvd daemons: where to listen, whom to know, when to give up on them."""

    listen: Annotated[
        str,
        Meta(
            description="Address on which other daemons reach this one; port 0 takes a free one.",
            extra={"rule": "tcp://IP:PORT, where IP is one address of this host or *"},
        ),
    ] = "tcp://127.0.0.1:7402"
    secret_key_file: (
        Annotated[
            str,
            Meta(
                description="File with this node's secret key, from kvd keygen. With it every "
                "peer, in and out, must prove a key of peers.keys, and bytes between daemons are "
                "encrypted. Left out: neither, which only loopback permits.",
                extra={"rule": "an absolute path; nobody but the user of the daemon may read it"},
                examples=["/etc/kvd/peer.secret"],
            ),
        ]
        | None
    ) = None
    insecure: Annotated[
        bool,
        Meta(
            description="Talk to other hosts without encryption or authentication. Only on a "
            "network where every host is trusted.",
        ),
    ] = False
    allow: Annotated[
        tuple[str, ...],
        Meta(
            description="Names of the nodes whose Hello is accepted. Empty: any node that can "
            "reach peers.listen.",
            extra={"rule": "a list of node names"},
            examples=[["prefill-0", "prefill-1"]],
        ),
    ] = ()
    connect: Annotated[
        dict[str, str],
        Meta(
            description="Peers by node name, each with its address: the names that receive() "
            "takes as its source.",
            extra={"rule": 'a table of NAME = "tcp://HOST:PORT"'},
            examples=[{"prefill-0": "tcp://127.0.0.1:7412"}],
        ),
    ] = {}
    keys: Annotated[
        dict[str, str],
        Meta(
            description="Public keys by node name: who may connect, each under its own name only, "
            "and whom to expect when dialing. This node's own may be among them, so that one list "
            "serves everywhere.",
            extra={"rule": 'a table of NAME = "KEY", 40 characters as kvd keygen prints them'},
            examples=[{"prefill-0": "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"}],
        ),
    ] = {}
    heartbeat_s: Annotated[
        float, Meta(ge=0.05, le=10, description="Seconds between two Pings to a peer.")
    ] = 0.5
    suspect_s: Annotated[
        float,
        Meta(ge=0.1, le=30, description="Seconds of silence after which a peer is suspect."),
    ] = 1.25
    lost_s: Annotated[
        float,
        Meta(
            ge=0.2,
            le=60,
            description="Seconds of silence after which a peer is lost and its rooms are drained.",
        ),
    ] = 2.5


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


class HttpSection(msgspec.Struct, frozen=True):
    """Probes and metrics."""

    listen: Annotated[
        str,
        Meta(
            description="Where /livez /readyz /metrics /info /status are served; port 0 takes a "
            "free one.",
            extra={"rule": "off, or IP:PORT on loopback (there is no authentication on it)"},
        ),
    ] = "127.0.0.1:7480"


class LogSection(msgspec.Struct, frozen=True):
    """What the daemon writes to its standard error."""

    format: Annotated[
        Literal["auto", "console", "json"],
        Meta(description="auto is console on a terminal and json elsewhere."),
    ] = "auto"
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="The least important events that are written."),
    ] = "info"


class LimitsSection(msgspec.Struct, frozen=True):
    """What nobody may exceed."""

    max_prompt_tokens: Annotated[
        int, Meta(ge=1, le=2**28, description="Longest prompt of a lease or a handoff.")
    ] = 2**20
    max_frame_bytes: Annotated[
        int,
        Meta(ge=2**16, le=2**31 - 1, description="Longest message frame on any socket."),
    ] = 16 * 2**20
    max_aux_bytes: Annotated[
        int,
        Meta(ge=0, le=2**16, description="Longest aux that a prefill engine may hand over."),
    ] = 2**16
    max_clients: Annotated[int, Meta(ge=1, le=65536, description="Engine sessions at a time.")] = (
        256
    )


class Config(msgspec.Struct, frozen=True):
    """The whole configuration, checked. ``origins`` says where each value came from, by key."""

    node: NodeSection
    sockets: SocketsSection
    peers: PeersSection
    pool: PoolSection
    radix: RadixSection
    admission: AdmissionSection
    transfer: TransferSection
    http: HttpSection
    log: LogSection
    limits: LimitsSection
    origins: dict[str, Origin]


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "node": NodeSection,
    "sockets": SocketsSection,
    "peers": PeersSection,
    "pool": PoolSection,
    "radix": RadixSection,
    "admission": AdmissionSection,
    "transfer": TransferSection,
    "http": HttpSection,
    "log": LogSection,
    "limits": LimitsSection,
}
"""Sections in the order in which they are shown."""
