"""Every section of kvd.toml and every key of it: type, default, bounds and documentation.

A section is a frozen struct and a key is a field of it; nothing is configurable that has no field
here or, of [pool], in ``kvd.families``. ``keys`` reads these structs into one table; ``rules`` and
``pool_rules`` hold what bounds cannot say. A key that may be left out without a value of its own is
``| None``, and its documentation says what then happens.

[engine] declares what no daemon can see: what the engine on this pool does. Nothing changes by it;
it is there so that what cannot work is refused before an engine finds out.

What must not be here: parsing, files, the environment.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvd.config.origin import ValueOrigin
from kvd.families import PoolSection
from kvd.families.keys import NAME_RULE, says
from kvd.types import MAX_FRAME_BYTES

SOCKET_RULE = "ipc:// and an absolute path of at most 100 bytes"


class NodeSection(msgspec.Struct, frozen=True):
    """Who this daemon is."""

    name: Annotated[
        str,
        says(
            "Name of this node: what peers, leases and events call it. Default: the host name.",
            rule=NAME_RULE,
        ),
    ]


class SocketsSection(msgspec.Struct, frozen=True):
    """Unix sockets for engines and operators on this host."""

    client: Annotated[
        str,
        says(
            "Where engines connect; attach.sock lies beside it. Default: client.sock in /run/kvd "
            "(root) or $XDG_RUNTIME_DIR/kvd.",
            rule=SOCKET_RULE,
        ),
    ]
    admin: Annotated[
        str,
        says(
            "Where consoles and the command line connect. Default: admin.sock beside the default "
            "client socket.",
            rule=SOCKET_RULE,
        ),
    ]
    mode: Annotated[
        str,
        says(
            "File mode of the sockets, in octal.",
            rule="four octal digits that let the owner read and write, like '0660'",
        ),
    ] = "0660"
    group: Annotated[
        str | None,
        says(
            "Group that owns the sockets. Left out: kvd if the daemon runs as root and that group "
            "exists, else the daemon's own group.",
            rule="the name of a group of this host",
            example="kvd",
        ),
    ] = None


class PeersSection(msgspec.Struct, frozen=True):
    """Other kvd daemons: where to listen, whom to know, when to give up on them."""

    listen: Annotated[
        str,
        says(
            "Address on which other daemons reach this one; port 0 takes a free one.",
            rule="tcp://IP:PORT, where IP is one address of this host or *",
        ),
    ] = "tcp://127.0.0.1:7402"
    secret_key_file: Annotated[
        str | None,
        says(
            "File with this node's secret key, from kvd keygen. With it every peer, in and out, "
            "must prove a key of peers.keys, and bytes between daemons are encrypted. Left out: "
            "neither, which only loopback permits.",
            rule="an absolute path; nobody but the user of the daemon may read it",
            example="/etc/kvd/peer.secret",
        ),
    ] = None
    insecure: Annotated[
        bool,
        says(
            "Talk to other hosts without encryption or authentication. Only on a network where "
            "every host is trusted."
        ),
    ] = False
    allow: Annotated[
        tuple[str, ...],
        says(
            "Names of the nodes whose Hello is accepted. Empty: any node that can reach "
            "peers.listen.",
            rule="a list of node names",
            example=["prefill-0", "prefill-1"],
        ),
    ] = ()
    connect: Annotated[
        dict[str, str],
        says(
            "Peers by node name, each with its address: the names that receive() takes as its "
            "source.",
            rule='a table of NAME = "tcp://HOST:PORT"',
            example={"prefill-0": "tcp://127.0.0.1:7412"},
        ),
    ] = {}
    keys: Annotated[
        dict[str, str],
        says(
            "Public keys by node name: who may connect, each under its own name only, and whom to "
            "expect when dialing. This node's own may be among them, so that one list serves "
            "everywhere.",
            rule='a table of NAME = "KEY", 40 characters as kvd keygen prints them',
            example={"prefill-0": "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"},
        ),
    ] = {}
    heartbeat_s: Annotated[
        float, Meta(ge=0.05, le=10), says("Seconds between two Pings to a peer.")
    ] = 0.5
    suspect_s: Annotated[
        float, Meta(ge=0.1, le=30), says("Seconds of silence after which a peer is suspect.")
    ] = 1.25
    lost_s: Annotated[
        float,
        Meta(ge=0.2, le=60),
        says("Seconds of silence after which a peer is lost and its rooms are drained."),
    ] = 2.5


class CacheSection(msgspec.Struct, frozen=True):
    """Whether KV is kept at all, and for whom."""

    mode: Annotated[
        Literal["radix", "off", "prefill-only"],
        says(
            "radix keeps committed KV for later prompts; off matches and inserts nothing; "
            "prefill-only has no KV anywhere: tokens are counted, no byte is taken, and whatever "
            "would read, write, send or cache KV is refused. Never chosen by itself."
        ),
    ] = "radix"


class EngineSection(msgspec.Struct, frozen=True):
    """What the engine on this pool does, declared so that what cannot work is refused at once."""

    workload: Annotated[
        Literal["generate", "embedding", "scoring"],
        says("generate decodes; embedding and scoring end with the prompt."),
    ] = "generate"
    chunk_tokens: Annotated[
        int,
        Meta(ge=-1, le=2**28),
        says(
            "Tokens of a prompt that the engine computes at a time; -1 is the whole prompt.",
            rule="-1, or a whole number from 1 to 268435456",
        ),
    ] = -1
    mixed_chunk: Annotated[
        bool, says("Chunks of prompts are computed in one batch with decoding requests.")
    ] = False
    context_parallel: Annotated[
        int, Meta(ge=1, le=1024), says("Ranks that share the computation of one prompt.")
    ] = 1
    attention: Annotated[
        Literal["paged", "varlen"],
        says("paged attention reads K and V from the pool; varlen reads what was just computed."),
    ] = "paged"


class RadixSection(msgspec.Struct, frozen=True):
    """The prefix cache."""

    policy: Annotated[
        Literal["lru", "lfu", "fifo", "priority"],
        says("Which cached pages give way first when room is needed."),
    ] = "lru"


class AdmissionSection(msgspec.Struct, frozen=True):
    """The queue of requests that wait for room."""

    max_deadline_s: Annotated[
        float,
        Meta(ge=0.1, le=3600),
        says("Longest time that a lease or a receive may wait; a longer deadline_s is cut to it."),
    ] = 30.0
    max_queue: Annotated[
        int, Meta(ge=1, le=1000000), says("Requests that may wait; the next is refused.")
    ] = 1024
    overtakers: Annotated[
        int,
        Meta(ge=0, le=1000000),
        says(
            "Head of line: how many later requests that fit may go past one that does not, before "
            "it blocks them; 0 is strictly first come first served."
        ),
    ] = 0
    drain_s: Annotated[
        float,
        Meta(ge=0, le=3600),
        says(
            "Longest time that a stop waits for the handoffs under way; what is left then is "
            "given up. Keep it 10 s below TimeoutStopSec of the unit."
        ),
    ] = 20.0


class TransferSection(msgspec.Struct, frozen=True):
    """The transfer process, which moves the bytes."""

    transport: Annotated[
        Literal["nixl", "loopback"], says("How bytes travel between nodes.", rule="nixl")
    ] = "nixl"
    integrity: Annotated[
        Literal["full", "sampled", "off"],
        says(
            "Which received pages are compared with what was sent before anything is cached: all "
            "of them, the first, the last and one in 16, or none."
        ),
    ] = "sampled"
    ucx: Annotated[
        dict[str, str],
        says(
            "Environment of the transfer process: UCX_NET_DEVICES, UCX_TLS and the like, over "
            "kvd's own defaults.",
            rule='a table of UCX_NAME = "text"',
            example={"UCX_NET_DEVICES": "eth0"},
        ),
    ] = {}
    stall_s: Annotated[
        float,
        Meta(ge=0.5, le=600),
        says(
            "Window in which a handoff with writes under way must move min_bytes_per_s; otherwise "
            "it fails as stalled. Progress is known per 16 MiB."
        ),
    ] = 10.0
    min_bytes_per_s: Annotated[
        int, Meta(ge=0, le=2**40), says("The slowest rate that is progress, per handoff.")
    ] = 2**20
    silent_s: Annotated[
        float,
        Meta(ge=1, le=600),
        says(
            "A transfer process whose loop does not answer for so long is killed and replaced; "
            "its handoffs are settled."
        ),
    ] = 5.0
    fence_after_s: Annotated[
        float,
        Meta(ge=0, le=86400),
        says(
            "Policy: a quarantine that lasts so long replaces the transfer process, which ends "
            "every transfer into this node; 0 leaves that to kvd fence."
        ),
    ] = 0.0


class AuditSection(msgspec.Struct, frozen=True):
    """The standing audit, which checks pages, locks, leases and transfers against each other."""

    budget: Annotated[
        float,
        Meta(ge=0, le=0.5),
        says(
            "Share of one core that it may use; 0 turns it off. A large pool is gone through in a "
            "few seconds at the default."
        ),
    ] = 0.01
    paranoid: Annotated[
        bool,
        says(
            "Ask every rule after every step, as kvd serve --paranoid does: for a hunt for a bug. "
            "It takes 0.2 ms a step with 40 leases, 10 ms with 1,000."
        ),
    ] = False


class ConsoleSection(msgspec.Struct, frozen=True):
    """What consoles (kvd-tui) may cost this node, all of them together."""

    budget: Annotated[
        float,
        Meta(gt=0, le=0.5),
        says(
            "Share of one core for looking at tables and page maps. Without credit a console gets "
            "what the last look found, and is told how old it is."
        ),
    ] = 0.03


class HttpSection(msgspec.Struct, frozen=True):
    """Probes and metrics."""

    listen: Annotated[
        str,
        says(
            "Where /livez /readyz /metrics /info /status are served; port 0 takes a free one.",
            rule="off, or IP:PORT on loopback (there is no authentication on it)",
        ),
    ] = "127.0.0.1:7480"


class LogSection(msgspec.Struct, frozen=True):
    """What the daemon writes to its standard error."""

    format: Annotated[
        Literal["auto", "console", "json"],
        says("auto is console on a terminal and json elsewhere."),
    ] = "auto"
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        says("The least important events that are written."),
    ] = "info"


class LimitsSection(msgspec.Struct, frozen=True):
    """What nobody may exceed."""

    max_prompt_tokens: Annotated[
        int, Meta(ge=1, le=2**28), says("Longest prompt of a lease or a handoff.")
    ] = 2**20
    max_frame_bytes: Annotated[
        int,
        Meta(ge=2**16, le=2**31 - 1),
        says("Longest message on any socket, all its frames; 16 MiB between daemons."),
    ] = MAX_FRAME_BYTES
    max_aux_bytes: Annotated[
        int, Meta(ge=0, le=2**16), says("Longest aux that a prefill engine may hand over.")
    ] = 2**16
    max_clients: Annotated[int, Meta(ge=1, le=65536), says("Engine sessions at a time.")] = 256


class RecorderSection(msgspec.Struct, frozen=True):
    """The flight recorder: the last inputs of the daemon, for kvd record and after a crash."""

    enabled: Annotated[
        bool,
        says(
            "Keep a recorder process, which writes the last minutes down when it is asked to, or "
            "when the daemon dies. At full rate a fifth more of the daemon's time, and once more "
            "the memory of the tree, in a process that runs when no other does."
        ),
    ] = True
    minutes: Annotated[
        float, Meta(ge=0.05, le=1440), says("How far back a recording reaches, if max_bytes allow.")
    ] = 5.0
    max_bytes: Annotated[
        int,
        Meta(ge=2**20, le=2**36),
        says(
            "Memory for the recorded inputs; a token of a request takes 4 bytes. Taken as it is "
            "needed."
        ),
    ] = 2**27
    directory: Annotated[
        str | None,
        says(
            "Where recordings are written, for the daemon's user only: they hold the token ids of "
            "prompts. Left out: recordings beside sockets.admin.",
            rule="an absolute path",
            example="/var/lib/kvd/recordings",
        ),
    ] = None


class Config(msgspec.Struct, frozen=True):
    """The whole configuration, checked. ``origins`` says where each value came from, by key."""

    node: NodeSection
    sockets: SocketsSection
    peers: PeersSection
    pool: PoolSection
    cache: CacheSection
    engine: EngineSection
    radix: RadixSection
    admission: AdmissionSection
    transfer: TransferSection
    audit: AuditSection
    console: ConsoleSection
    http: HttpSection
    log: LogSection
    limits: LimitsSection
    recorder: RecorderSection
    origins: dict[str, ValueOrigin]


SECTIONS: dict[str, type[msgspec.Struct]] = {
    one.name: one.type for one in msgspec.structs.fields(Config) if one.name != "origins"
}
"""Sections in the order in which they are shown; [pool] without the keys of one family alone."""
