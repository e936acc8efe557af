"""The figures the core decides by; the shell fills them from the configuration."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from kvd.core.cache.eviction import Policy
from kvd.core.layout.quota import Quota
from kvd.core.layout.spec import PoolSpec
from kvd.types import Incarnation, NodeName
from kvd.wire.bounds import MAX_PEER_BYTES
from kvd.wire.peer import Integrity


class CacheMode(enum.Enum):
    """Whether KV is kept for later prompts, is not, or is nowhere at all."""

    RADIX = "radix"
    OFF = "off"
    PREFILL_ONLY = "prefill-only"


class DialRule(enum.Enum):
    """Which addresses of no configured peer this node dials when an engine names one."""

    NONE = "none"
    """It has a key, and lists nobody else's: whoever answered would not be believed."""
    LOOPBACK = "loopback"
    """It has no key, so nothing leaves the host."""
    ANY = "any"
    """Keys say who answers; or ``peers.insecure`` says that anybody may."""


class Demotion(enum.Enum):
    """Which of the pages that are about to leave the pool are written to a tier."""

    ALWAYS = "always"
    SECOND_USE = "second-use"
    """Those that somebody has found in the cache at least once."""
    PRIORITY = "priority"
    """Those of somebody who asked for them with a priority above 0."""
    NEVER = "never"


TIER_SHARE: Final = 8
"""Of the pool's pages one in so many may be on its way to a tier, and as many from there."""


class TierSettings(msgspec.Struct, frozen=True):
    """One tier below the pool."""

    name: str
    capacity_bytes: int
    object_bytes: int
    """Of one object as it counts against the capacity: page, header, rounding."""
    demotion: Demotion = Demotion.ALWAYS
    wait_s: float = 2.0
    """How long a request waits for its pages from here at most."""
    deadline_s: float = 10.0
    """An order without an answer for so long ends the storage process."""
    max_moving_bytes: int = 2**28
    """Under way at a time, each way."""
    share_beside_handoffs: float = 1.0
    """Of its time, what is written takes no more while bytes of handoffs move; 1: all of it."""
    is_shared: bool = False
    """Others write there too: what lies there is asked for, and nothing is removed for a bound."""
    absent_s: float = 10.0
    """How long what was not there is not asked for again; of one that is shared."""
    lifetime_s: float = 0.0
    """How long an object lies there from its writing on; 0: until it is removed."""
    probe_s: float = 0.25
    """How long a request waits to hear what is there; of one that is shared, as the next."""
    stop_s: float = 0.0
    """At a stop of a node whose pool ends with it: how long what is cached is written; 0: not."""
    least_bytes: int = 0
    """Of token ids: what of a prompt is shorter is not asked for."""
    quotas: tuple[Quota, ...] = ()
    """In objects; of one that is shared ceilings alone, of what this node writes (``tiers``)."""


class KvEventSettings(msgspec.Struct, frozen=True):
    """What routers are told of."""

    medium: str
    """Where the pool is, in a router's words: ``GPU`` or ``CPU``."""
    bases: tuple[str, ...] = ()
    """What the base of a namespace begins with, or it is not told of; none: all are."""
    most_tokens: int = 65_536
    """Told from one tick to the next; the loop needs some 3 ms for the batches of so many."""


class Settings(msgspec.Struct, frozen=True):
    """Who this node is, what its pool holds, and how long anything may take (seconds)."""

    name: NodeName
    incarnation: Incarnation
    spec: PoolSpec
    policy: Policy = Policy.LRU
    quotas: tuple[Quota, ...] = ()
    """Of the pool, in pages of its first component."""
    home: str = ""
    """Where this node keeps the births of its processes in order; empty: it does not say."""
    build: str = ""
    """Behind the version in what is told of this node: ``+compiled`` where its core is."""
    allow: tuple[str, ...] = ()
    """Nodes that may exchange KV with us, as in ``peers.allowed``; empty: every one that can reach
    the socket."""
    dials: DialRule = DialRule.NONE
    heartbeat_s: float = 0.5
    suspect_s: float = 1.25
    lost_s: float = 2.5
    forget_s: float = 30.0
    """A lost peer that came to us, and with which nothing is open, is forgotten after this."""
    max_deadline_s: float = 30.0
    max_queue: int = 1024
    overtakers: int = 0
    """How many requests may go past one that does not fit; 0: it blocks those behind it."""
    max_prompt_tokens: int = 1_048_576
    max_aux_bytes: int = 65_536
    max_told_bytes: int = 2**28
    """Prompts with a number that are kept, of all sessions together."""
    max_frame_bytes: int = MAX_PEER_BYTES
    """The longest message of a peer that is read here."""
    resend_s: float = 0.2
    """First repetition of an unanswered message; doubles up to ``max_resend_s``."""
    max_resend_s: float = 1.0
    stall_s: float = 10.0
    min_bytes_per_s: int = 1_048_576
    """A peer to which posts under way move less than this over ``stall_s`` stalls their parts."""
    load_limit_s: float = 15.0
    """A sending agent that is not made in this time has failed."""
    fence_after_s: float = 0.0
    """A quarantine older than this fences the node; 0: only an operator does."""
    drain_s: float = 5.0
    """After this a draining send destroys its sending agent, so that it can settle."""
    linger_s: float = 30.0
    """How long Settled is repeated to a decode side that never says Closed."""
    pull_offer_s: float = 10.0
    """How long what a peer pulls is locked before its Offer has come, or the ask has come again."""
    max_pulls: int = 2048
    """Open at a time: waiting for an Offer, or being sent."""
    max_peer_pulls: int = 512
    pull_share: float = 0.75
    """Of the pool's pages, what all open pulls may lock; one alone may lock more."""
    peer_pull_share: float = 0.5
    integrity: Integrity = Integrity.OFF
    """Which of the pages that we receive are verified before anything is kept."""
    sum_ahead_bytes: int = 4 * 2**20
    """So much that is to be verified must have landed that it is summed ahead of the end."""
    cache_mode: CacheMode = CacheMode.RADIX
    tiers: tuple[TierSettings, ...] = ()
    """Below the pool, the nearest first."""
    is_journaled: bool = False
    """Whether the pool outlives the process: what moves in it is noted for the next one."""
    kv_events: KvEventSettings | None = None
    """None: nobody is told."""
