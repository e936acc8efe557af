"""Where a node is and whom it meets: [node], [sockets], [peers]."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


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
