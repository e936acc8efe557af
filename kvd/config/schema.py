"""Every section of kvd.toml and every key of it: type, default, bounds and documentation.

A section is a frozen struct and a key is a field of it; nothing is configurable that has no field
here or, of [pool], in ``kvd.families``. ``keys`` reads these structs into one table; ``rules``,
``pool_rules``, ``tier_rules`` and ``quota_rules`` hold what bounds cannot say. A key that may be
left out without a value of its own is ``| None``, and its documentation says what then happens.

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
from kvd.families.keys import NAME_RULE, SIZE_RULE, example, rule
from kvd.types import MAX_FRAME_BYTES

SOCKET_RULE = "ipc:// and an absolute path of at most 100 bytes"


class NodeSection(msgspec.Struct, frozen=True):
    """Who this daemon is."""

    name: Annotated[str, rule(NAME_RULE)]
    """Name of this node: what peers, leases and events call it. Default: the host name."""


class SocketsSection(msgspec.Struct, frozen=True):
    """Unix sockets for engines and operators on this host."""

    client: Annotated[str, rule(SOCKET_RULE)]
    """Where engines connect; attach.sock lies beside it. Default: client.sock in /run/kvd (root) or
    $XDG_RUNTIME_DIR/kvd."""
    admin: Annotated[str, rule(SOCKET_RULE)]
    """Where consoles and the command line connect. Default: admin.sock beside the default client
    socket."""
    mode: Annotated[
        str, rule("four octal digits that let the owner read and write, like '0660'")
    ] = "0660"
    """File mode of the sockets, in octal."""
    group: Annotated[str | None, rule("the name of a group of this host"), example("kvd")] = None
    """Group that owns the sockets. Left out: kvd if the daemon runs as root and that group exists,
    else the daemon's own group."""


class PeersSection(msgspec.Struct, frozen=True):
    """Other kvd daemons: where to listen, whom to know, when to give up on them."""

    listen: Annotated[str, rule("tcp://IP:PORT, where IP is one address of this host or *")] = (
        "tcp://127.0.0.1:7402"
    )
    """Address on which other daemons reach this one; port 0 takes a free one."""
    secret_key_file: Annotated[
        str | None,
        rule("an absolute path; nobody but the user of the daemon may read it"),
        example("/etc/kvd/peer.secret"),
    ] = None
    """File with this node's secret key, from kvd keygen. With it every peer, in and out, must prove
    a key of peers.keys, and bytes between daemons are encrypted. Left out: neither, which only
    loopback permits."""
    insecure: bool = False
    """Talk to other hosts without encryption or authentication. Only on a network where every host
    is trusted."""
    allow: Annotated[
        tuple[str, ...],
        rule("a list of NAME or NAME:NAMESPACE"),
        example(["prefill-0", "decode-1:llama"]),
    ] = ()
    """Names of the nodes whose Hello is accepted. Empty: any node that can reach peers.listen. A
    name alone may pull what is cached in any namespace; with namespaces behind it, an entry for
    each, in these alone and in their members (llama means llama#... too). Rooms are not restricted:
    an engine opens each, and whoever takes it has the whole prompt."""
    connect: Annotated[
        dict[str, str],
        rule('a table of NAME = "tcp://HOST:PORT"'),
        example({"prefill-0": "tcp://127.0.0.1:7412"}),
    ] = {}
    """Peers by node name, each with its address: the names that receive() takes as its source."""
    keys: Annotated[
        dict[str, str],
        rule('a table of NAME = "KEY", 40 characters as kvd keygen prints them'),
        example({"prefill-0": "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"}),
    ] = {}
    """Public keys by node name: who may connect, each under its own name only, and whom to expect
    when dialing. This node's own may be among them, so that one list serves everywhere."""
    heartbeat_s: Annotated[float, Meta(ge=0.05, le=10)] = 0.5
    """Seconds between two Pings to a peer."""
    suspect_s: Annotated[float, Meta(ge=0.1, le=30)] = 1.25
    """Seconds of silence after which a peer is suspect."""
    lost_s: Annotated[float, Meta(ge=0.2, le=60)] = 2.5
    """Seconds of silence after which a peer is lost and its rooms are drained."""


class CacheSection(msgspec.Struct, frozen=True):
    """Whether KV is kept at all, and for whom."""

    mode: Literal["radix", "off", "prefill-only"] = "radix"
    """radix keeps committed KV for later prompts; off matches and inserts nothing; prefill-only has
    no KV anywhere: tokens are counted, no byte is taken, and whatever would read, write, send or
    cache KV is refused. Never chosen by itself."""
    epochs_directory: Annotated[str | None, rule("an absolute path"), example("/var/lib/kvd")] = (
        None
    )
    """Where NAME.epochs is kept, which tells the next daemon of this node the epochs of its
    namespaces, and what was flushed of its tiers. Left out: beside sockets.client, which a restart
    of the host empties."""


class DiskTierSection(msgspec.Struct, frozen=True):
    """A tier on a disk of this host: pages that leave the pool are kept there, and found again."""

    directory: Annotated[
        str | None, rule("an absolute path"), example("/var/lib/kvd/tiers/disk")
    ] = None
    """Where pages are kept: a directory of this daemon alone and for its user only, made if it is
    not there. What is no object of its pool is removed from it. Left out: there is no such tier."""
    size: Annotated[str | None, rule(SIZE_RULE), example("512GiB")] = None
    """What lies there takes no more than this. The oldest used is removed first."""
    demote: Literal["always", "second-use", "priority", "never"] = "always"
    """Which pages are written there before they leave the pool: all; those that a request has found
    in the cache at least once; those of a request with a priority above 0; or none, and what lies
    there is still found."""
    wait_s: Annotated[float, Meta(ge=0, le=600)] = 2.0
    """How long a request waits for its pages from there at most; then it takes what is in the pool.
    0: none does unless it says so."""
    deadline_s: Annotated[float, Meta(ge=1, le=3600)] = 10.0
    """An order to the storage process that takes longer ends that process, and the next one begins.
    """
    stop_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    """At a stop, so long at most is written what is cached and not there yet, what would be evicted
    last first. 0: not. A pool that outlives the daemon needs none of it."""
    max_moving: Annotated[str, rule(SIZE_RULE)] = "256MiB"
    """Bytes under way to there at a time, and as many from there: their pages are locked."""
    max_rate: Annotated[str | None, rule(SIZE_RULE), example("1GiB")] = None
    """Bytes a second to there at most, and as many from there. Left out: what the disk does."""
    share_beside_handoffs: Annotated[float, Meta(ge=0.01, le=1)] = 0.25
    """While bytes of handoffs move and processors are short, what is written there takes no more
    than this share of the time that it would. 1: it gives way to none."""


class StoreTierSection(msgspec.Struct, frozen=True):
    """A tier in a store that speaks S3 and that nodes share: what one has written others find."""

    endpoint: Annotated[
        str | None,
        rule("http://HOST:PORT or https://HOST, and nothing behind it"),
        example("https://s3.eu-central-1.amazonaws.com"),
    ] = None
    """Where the store listens. Left out: there is no such tier."""
    insecure: bool = False
    """Speak http with a store on another host. Only where every host of the network is trusted."""
    bucket: Annotated[str | None, rule("3 to 63 of a-z, 0-9, . and -"), example("kvd")] = None
    """The bucket. It must be there; kvd makes none and removes nothing from it."""
    prefix: Annotated[
        str | None, rule("plain names with / between them"), example("kv/llama-70b-r3")
    ] = None
    """What names of objects begin with. Nodes that share pages have the same. Left out: nothing."""
    region: Annotated[str, rule("a name like us-east-1")] = "us-east-1"
    """Of the bucket, where the store asks for one."""
    credentials_file: Annotated[
        str | None,
        rule("an absolute path; nobody but the user of the daemon may read it"),
        example("/etc/kvd/store.credentials"),
    ] = None
    """File with the keys, as AWS's own tools have them. The storage process alone reads it. Left
    out: AWS's chain is asked: environment, ~/.aws, the role of the host."""
    profile: Annotated[str | None, rule("a plain name"), example("kvd")] = None
    """Which profile of it. Left out: default, or AWS_PROFILE."""
    ca_file: Annotated[str | None, rule("an absolute path"), example("/etc/kvd/store-ca.pem")] = (
        None
    )
    """File with the certificates that an https store is believed by. Left out: those of the host.
    """
    ttl_s: Annotated[float, Meta(ge=60, le=31536000)] = 86400.0
    """How long the bucket keeps an object: set its lifecycle to this or more. What this node knows
    of the store it forgets as often, and asks again."""
    demote: Literal["always", "second-use", "priority", "never"] = "second-use"
    """As tiers.disk.demote."""
    wait_s: Annotated[float, Meta(ge=0, le=600)] = 2.0
    """As tiers.disk.wait_s."""
    probe_s: Annotated[float, Meta(ge=0, le=60)] = 0.25
    """How long a request waits at most to hear whether the store has its pages, where this node
    does not know. 0: none waits; the next one that asks for the same is told."""
    min_tokens: Annotated[int, Meta(ge=1, le=2**28)] = 256
    """What of a prompt is shorter than this is not asked for: it is computed as soon."""
    absent_s: Annotated[float, Meta(ge=0, le=86400)] = 10.0
    """What was not there is not asked for again so long."""
    answer_s: Annotated[float, Meta(ge=0.1, le=60)] = 3.0
    """When the store has been silent for so long, what was asked of it is given up."""
    deadline_s: Annotated[float, Meta(ge=5, le=3600)] = 60.0
    """As tiers.disk.deadline_s."""
    stop_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    """As tiers.disk.stop_s; both at once."""
    max_moving: Annotated[str, rule(SIZE_RULE)] = "64MiB"
    """As tiers.disk.max_moving; the storage process has as much memory of its own, twice."""
    max_rate: Annotated[str | None, rule(SIZE_RULE), example("250MiB")] = None
    """As tiers.disk.max_rate: of a network that handoffs need too."""


class PoolQuotaSection(msgspec.Struct, frozen=True):
    """What namespaces keep of the pool's cached pages, and above what they give way first."""

    floor: Annotated[
        dict[str, str], rule(f"a table of NAMESPACE = {SIZE_RULE}"), example({"llama": "20GiB"})
    ] = {}
    """By namespace, so much of it stays cached as long as anything else can be evicted. The name of
    a base means it with all its members and epochs (llama means llama#... too), the name of a
    member that one alone. All floors together must fit into the pool."""
    ceiling: Annotated[
        dict[str, str], rule(f"a table of NAMESPACE = {SIZE_RULE}"), example({"batch": "8GiB"})
    ] = {}
    """By namespace, what of it is cached above this is evicted before all else. As long as nobody
    needs the room it stays, and what leases lock or hold is never evicted nor refused."""


class DiskQuotaSection(msgspec.Struct, frozen=True):
    """The same of what lies in tiers.disk."""

    floor: Annotated[
        dict[str, str], rule(f"a table of NAMESPACE = {SIZE_RULE}"), example({"llama": "200GiB"})
    ] = {}
    """By namespace, so much of it lies there for good, as far as it was written. All floors and
    what is under way (tiers.disk.max_moving) must fit into tiers.disk.size."""
    ceiling: Annotated[
        dict[str, str], rule(f"a table of NAMESPACE = {SIZE_RULE}"), example({"batch": "50GiB"})
    ] = {}
    """By namespace, what of it lies there above this is removed before all else, when room is
    needed."""


class StoreQuotaSection(msgspec.Struct, frozen=True):
    """How much of a namespace this node writes to tiers.store; kvd removes nothing there."""

    ceiling: Annotated[
        dict[str, str], rule(f"a table of NAMESPACE = {SIZE_RULE}"), example({"batch": "50GiB"})
    ] = {}
    """By namespace, so much of it at most is written there by this node within tiers.store.ttl_s.
    Above that nothing more of it is, until what was written is as old. Nobody counts what other
    nodes write, nor what this one wrote before its daemon began."""


class EngineSection(msgspec.Struct, frozen=True):
    """What the engine on this pool does, declared so that what cannot work is refused at once."""

    workload: Literal["generate", "embedding", "scoring"] = "generate"
    """generate decodes; embedding and scoring end with the prompt."""
    chunk_tokens: Annotated[
        int, Meta(ge=-1, le=2**28), rule("-1, or a whole number from 1 to 268435456")
    ] = -1
    """Tokens of a prompt that the engine computes at a time; -1 is the whole prompt."""
    mixed_chunk: bool = False
    """Chunks of prompts are computed in one batch with decoding requests."""
    context_parallel: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Ranks that share the computation of one prompt."""
    attention: Literal["paged", "varlen"] = "paged"
    """paged attention reads K and V from the pool; varlen reads what was just computed."""


class RadixSection(msgspec.Struct, frozen=True):
    """The prefix cache."""

    policy: Literal["lru", "lfu", "slru", "fifo", "priority"] = "lru"
    """Which cached pages give way first when room is needed."""


class AdmissionSection(msgspec.Struct, frozen=True):
    """The queue of requests that wait for room."""

    max_deadline_s: Annotated[float, Meta(ge=0.1, le=3600)] = 600.0
    """Longest time that a lease or a receive may wait; a longer deadline_s is cut to it."""
    max_queue: Annotated[int, Meta(ge=1, le=1000000)] = 1024
    """Requests that may wait; the next is refused."""
    overtakers: Annotated[int, Meta(ge=0, le=1000000)] = 0
    """Head of line: how many later requests that fit may go past one that does not, before it
    blocks them; 0 is strictly first come first served."""
    drain_s: Annotated[float, Meta(ge=0, le=3600)] = 20.0
    """Longest time that a stop waits for the handoffs under way; what is left then is given up.
    With tiers.disk.stop_s or tiers.store.stop_s, which come after it, keep it 10 s below
    TimeoutStopSec of the unit."""


class PullSection(msgspec.Struct, frozen=True):
    """What other nodes pull from this one's cache, beside this node's own engines."""

    offer_s: Annotated[float, Meta(ge=0.1, le=600)] = 10.0
    """How long a pull locks what is cached before the other node has offered pages for it, or said
    again that it waits for them."""
    max_open: Annotated[int, Meta(ge=1, le=65536)] = 2048
    """Pulls that wait for their Offer or are being sent, of all nodes; the next is refused."""
    max_open_per_peer: Annotated[int, Meta(ge=1, le=1000)] = 512
    """The same of one node."""
    share: Annotated[float, Meta(gt=0, le=1)] = 0.75
    """Share of the pool's pages that all of them may lock together; one alone may lock more."""
    share_per_peer: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """The same of one node."""


class TransferSection(msgspec.Struct, frozen=True):
    """The transfer process, which moves the bytes."""

    transport: Annotated[Literal["nixl", "loopback"], rule("nixl")] = "nixl"
    """How bytes travel between nodes."""
    integrity: Literal["full", "sampled", "off"] = "sampled"
    """Which received pages are compared with what was sent before anything is cached: all of them,
    the first, the last and one in 16, or none."""
    ucx: Annotated[
        dict[str, str], rule('a table of UCX_NAME = "text"'), example({"UCX_NET_DEVICES": "eth0"})
    ] = {}
    """Environment of the transfer process: UCX_NET_DEVICES, UCX_TLS and the like, over kvd's own
    defaults."""
    stall_s: Annotated[float, Meta(ge=0.5, le=600)] = 10.0
    """Window in which the handoffs with writes under way to one peer must move min_bytes_per_s
    together; otherwise they fail as stalled. Progress is known per 16 MiB."""
    min_bytes_per_s: Annotated[int, Meta(ge=0, le=2**40)] = 2**20
    """The slowest rate that is progress, per peer."""
    silent_s: Annotated[float, Meta(ge=1, le=600)] = 5.0
    """A transfer process whose loop does not answer for so long is killed and replaced; its
    handoffs are settled."""
    fence_after_s: Annotated[float, Meta(ge=0, le=86400)] = 0.0
    """Policy: a quarantine that lasts so long replaces the transfer process, which ends every
    transfer into this node; 0 leaves that to kvd fence."""


class AuditSection(msgspec.Struct, frozen=True):
    """The standing audit, which checks pages, locks, leases and transfers against each other."""

    budget: Annotated[float, Meta(ge=0, le=0.5)] = 0.01
    """Share of one core that it may use; 0 turns it off. A large pool is gone through in a few
    seconds at the default."""
    paranoid: bool = False
    """Ask every rule after every step, as kvd serve --paranoid does: for a hunt for a bug. It takes
    0.2 ms a step with 40 leases, 10 ms with 1,000."""


class ConsoleSection(msgspec.Struct, frozen=True):
    """What consoles (kvd-tui) may cost this node, all of them together."""

    budget: Annotated[float, Meta(gt=0, le=0.5)] = 0.03
    """Share of one core for looking at tables and page maps. Without credit a console gets what the
    last look found, and is told how old it is."""


class HttpSection(msgspec.Struct, frozen=True):
    """Probes and metrics."""

    listen: Annotated[
        str, rule("off, or IP:PORT on loopback (there is no authentication on it)")
    ] = "127.0.0.1:7480"
    """Where /livez /readyz /metrics /info /status are served; port 0 takes a free one."""


class KvEventsSection(msgspec.Struct, frozen=True):
    """KV events for routers: which prefixes are cached here, as vLLM publishes them."""

    enabled: bool = False
    """Publish them. They say the token ids of every cached prompt."""
    model: Annotated[
        str | None, rule("1 to 256 printable characters without @"), example("llama-70b")
    ] = None
    """The model's name as routers know it: the third part of the topic, kv@NODE@MODEL."""
    namespaces: Annotated[
        tuple[str, ...],
        rule("a list of what namespaces begin with, without #"),
        example(["llama"]),
    ] = ()
    """What the base of a namespace of that model begins with; others are not told of. Empty: all
    are, which is right for a pool of one model."""
    listen: Annotated[str, rule("tcp://IP:PORT, where IP is one address of this host or *")] = (
        "tcp://127.0.0.1:7403"
    )
    """Where routers subscribe."""
    replay: Annotated[str, rule("tcp://IP:PORT, where IP is one address of this host or *")] = (
        "tcp://127.0.0.1:7404"
    )
    """Where they ask for batches that they have missed."""
    insecure: bool = False
    """Publish on other addresses than loopback: routers speak no CURVE, so whoever reaches them
    reads the token ids. Only on a network where every host is trusted."""
    heartbeat_s: Annotated[float, Meta(ge=0.1, le=3600)] = 5.0
    """An empty batch is published after so long without one: a router notices by its number that it
    has missed something."""
    keep_batches: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    """The last batches are kept for routers that have missed them, up to 64 MiB."""


class LogSection(msgspec.Struct, frozen=True):
    """What the daemon writes to its standard error."""

    format: Literal["auto", "console", "json"] = "auto"
    """auto is console on a terminal and json elsewhere."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important events that are written."""


class LimitsSection(msgspec.Struct, frozen=True):
    """What nobody may exceed."""

    max_prompt_tokens: Annotated[int, Meta(ge=1, le=2**28)] = 2**20
    """Longest prompt of a lease or a handoff."""
    max_frame_bytes: Annotated[int, Meta(ge=2**16, le=2**31 - 1)] = MAX_FRAME_BYTES
    """Longest message on any socket, all its frames; 16 MiB between daemons."""
    max_aux_bytes: Annotated[int, Meta(ge=0, le=2**16)] = 2**16
    """Longest aux that a prefill engine may hand over."""
    max_clients: Annotated[int, Meta(ge=1, le=65536)] = 256
    """Engine sessions at a time."""
    max_told_bytes: Annotated[int, Meta(ge=0, le=2**40)] = 2**28
    """Tokens of prompts with a number that are kept for all sessions together, 4 bytes each; of one
    session 32 MiB at most. Above it the session with most forgets its oldest, and tells it anew
    when it asks about it again."""


class RecorderSection(msgspec.Struct, frozen=True):
    """The flight recorder: the last inputs of the daemon, for kvd record and after a crash."""

    enabled: bool = True
    """Keep a recorder process, which writes the last minutes down when it is asked to, or when the
    daemon dies. At full rate a tenth more of the daemon's time, and once more the memory of the
    tree, in a process that runs when no other does."""
    minutes: Annotated[float, Meta(ge=0.05, le=1440)] = 5.0
    """How far back a recording reaches, if max_bytes allow."""
    max_bytes: Annotated[int, Meta(ge=2**20, le=2**36)] = 2**27
    """Memory for the recorded inputs; a token of a request takes 4 bytes. Taken as it is needed."""
    directory: Annotated[
        str | None, rule("an absolute path"), example("/var/lib/kvd/recordings")
    ] = None
    """Where recordings are written, for the daemon's user only: they hold the token ids of prompts.
    Left out: recordings beside sockets.admin."""


class Config(msgspec.Struct, frozen=True):
    """The whole configuration, checked. ``origins`` says where each value came from, by key."""

    node: NodeSection
    sockets: SocketsSection
    peers: PeersSection
    pool: PoolSection
    cache: CacheSection
    tiers_disk: DiskTierSection = msgspec.field(name="tiers.disk")
    tiers_store: StoreTierSection = msgspec.field(name="tiers.store")
    quotas_pool: PoolQuotaSection = msgspec.field(name="quotas.pool")
    quotas_disk: DiskQuotaSection = msgspec.field(name="quotas.disk")
    quotas_store: StoreQuotaSection = msgspec.field(name="quotas.store")
    engine: EngineSection
    radix: RadixSection
    admission: AdmissionSection
    pull: PullSection
    transfer: TransferSection
    audit: AuditSection
    console: ConsoleSection
    http: HttpSection
    kv_events: KvEventsSection
    log: LogSection
    limits: LimitsSection
    recorder: RecorderSection
    origins: dict[str, ValueOrigin]


def field_of(section: str) -> str:
    """The field of ``Config`` that has a section: ``tiers_disk`` has [tiers.disk]."""
    return section.replace(".", "_")


SECTIONS: dict[str, type[msgspec.Struct]] = {
    field.encode_name: field.type
    for field in msgspec.structs.fields(Config)
    if field.name != "origins"
}
"""Sections in the order in which they are shown; [pool] without the keys of one family alone."""
