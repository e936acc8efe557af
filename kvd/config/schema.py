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

from kvd.config.node_sections import NodeSection, PeersSection, SocketsSection
from kvd.config.origin import Origin
from kvd.config.pool_sections import PoolSection
from kvd.config.work_sections import (
    AdmissionSection,
    CacheSection,
    EngineSection,
    RadixSection,
    TransferSection,
)
from kvd.types import MAX_FRAME_BYTES


class AuditSection(msgspec.Struct, frozen=True):
    """The standing audit, which checks pages, locks, leases and transfers against each other."""

    budget: Annotated[
        float,
        Meta(
            ge=0,
            le=0.5,
            description="Share of one core that it may use; 0 turns it off. A large pool is gone "
            "through in a few seconds at the default.",
        ),
    ] = 0.01
    paranoid: Annotated[
        bool,
        Meta(
            description="Ask every rule after every step, as kvd serve --paranoid does: for a hunt "
            "for a bug. It takes 0.2 ms a step with 40 leases, 10 ms with 1,000.",
        ),
    ] = False


class ConsoleSection(msgspec.Struct, frozen=True):
    """What consoles (kvd-tui) may cost this node, all of them together."""

    budget: Annotated[
        float,
        Meta(
            gt=0,
            le=0.5,
            description="Share of one core for looking at tables and page maps. Without credit a "
            "console gets what the last look found, and is told how old it is.",
        ),
    ] = 0.03


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
        Meta(
            ge=2**16,
            le=2**31 - 1,
            description="Longest message on any socket, all its frames; 16 MiB between daemons.",
        ),
    ] = MAX_FRAME_BYTES
    max_aux_bytes: Annotated[
        int,
        Meta(ge=0, le=2**16, description="Longest aux that a prefill engine may hand over."),
    ] = 2**16
    max_clients: Annotated[int, Meta(ge=1, le=65536, description="Engine sessions at a time.")] = (
        256
    )


class RecorderSection(msgspec.Struct, frozen=True):
    """The flight recorder: the last inputs of the daemon, for kvd record and after a crash."""

    enabled: Annotated[
        bool,
        Meta(
            description="Keep a recorder process, which writes the last minutes down when it is "
            "asked to, or when the daemon dies. At full rate a fifth more of the daemon's time, "
            "and once more the memory of the tree, in a process that runs when no other does."
        ),
    ] = True
    minutes: Annotated[
        float,
        Meta(ge=0.05, le=1440, description="How far back a recording reaches, if max_bytes allow."),
    ] = 5.0
    max_bytes: Annotated[
        int,
        Meta(
            ge=2**20,
            le=2**36,
            description="Memory for the recorded inputs; a token of a request takes 4 bytes. Taken "
            "as it is needed.",
        ),
    ] = 2**27
    directory: (
        Annotated[
            str,
            Meta(
                description="Where recordings are written, for the daemon's user only: they hold "
                "the token ids of prompts. Left out: recordings beside sockets.admin.",
                extra={"rule": "an absolute path"},
                examples=["/var/lib/kvd/recordings"],
            ),
        ]
        | None
    ) = None


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
    origins: dict[str, Origin]


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "node": NodeSection,
    "sockets": SocketsSection,
    "peers": PeersSection,
    "pool": PoolSection,
    "cache": CacheSection,
    "engine": EngineSection,
    "radix": RadixSection,
    "admission": AdmissionSection,
    "transfer": TransferSection,
    "audit": AuditSection,
    "console": ConsoleSection,
    "http": HttpSection,
    "log": LogSection,
    "limits": LimitsSection,
    "recorder": RecorderSection,
}
"""Sections in the order in which they are shown."""
