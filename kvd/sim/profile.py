"""How bad a simulated world is: rates of everything that goes wrong, by name.

A seed of ``mixed`` draws one of those in ``DRAWN``. Shares are of all messages, posts or requests.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

FAULTS = (
    "engine",
    "daemon",
    "transfer",
    "suspend",
    "partition",
    "isolate",
    "reconnect",
    "fence",
    "evict",
    "flush",
    "abort",
    "agent",
)
"""What ``faults`` can do to a node; beside these, ``worker`` and ``deaf`` to engines that copy,
``storage`` and ``damage`` to a tier below the pool, ``pin``, ``unpin`` and ``flush-one`` (a
namespace) to what is cached; ``stop`` asks a daemon to end, ``epoch`` tells all of new weights."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of weather."""

    loss: float = 0.0
    repeats: float = 0.0
    delays: float = 0.0
    """Share of messages that come later than those sent after them."""
    longest_delay_s: float = 0.3
    faults_per_s: float = 0.0
    faults: tuple[str, ...] = FAULTS
    longest_trouble_s: float = 4.0
    """Of a partition, a suspension or a daemon that is down: longer than it takes to be lost."""
    forget_s: float = 20.0
    """When a lost peer that came to a node is forgotten there."""
    cuts_data: bool = False
    """Whether a partition holds back what is written, too: it arrives when that is over."""
    failing_posts: float = 0.0
    stalled_posts: float = 0.0
    slow_posts: float = 0.0
    failing_loads: float = 0.0
    hanging_loads: float = 0.0
    """Share of sending agents that are never made, and never said to have failed."""
    doubts: float = 0.0
    """Share of destroyed sending agents that leave bytes in the receiver's sockets."""
    pool_pages: tuple[int, ...] = (40, 64, 96)
    requests_per_s: float = 10.0
    """Per decode node."""
    deadlines_s: tuple[float, ...] = (0.5, 2.0, 5.0)
    fickle: float = 0.05
    """Share of requests whose engine changes its mind."""
    lonely: float = 0.03
    """Share of requests of which only one side hears."""
    pulls: float = 0.0
    """Share of requests that have no room: what one source has cached is pulled."""
    device_paths: float = 0.0
    """Share of posts by which a process finds out how bytes of a device travel to a peer."""
    copying: float = 0.0
    """Share of requests whose engine computes in blocks of its own, and copies."""
    family: str = "mha"
    """Of the pools; see ``pool``."""
    beside_pages: tuple[int, ...] = ()
    """Of the component beside the first that has pages of its own."""
    tier_objects: tuple[int, ...] = ()
    """What a tier below the pool holds; none: there is no tier."""
    has_quotas: bool = False
    """Whether namespaces have quotas of the pool and of the tier."""
    shares_tier: bool = False
    """Whether it is one store of all nodes, which may lie and lose."""
    has_store_below: bool = False
    """Whether there is such a store below that tier too."""
    has_epochs: bool = False
    """Whether a daemon finds the epochs that the one before it has kept."""
    burst_s: float = 0.0
    quiet_s: float = 0.0
    """How long requests come, and how long none, in turns; 0: they come all the time."""
    rests: bool = False
    """Whether a daemon at rest ticks when something is due, as a real one does."""
    has_routers: bool = False
    """Whether somebody listens to KV events, and misses some now and then."""


_OTHER_FAMILY = Profile(
    loss=0.03,
    delays=0.1,
    faults_per_s=0.5,
    slow_posts=0.1,
    failing_posts=0.02,
    failing_loads=0.05,
    doubts=0.6,
    fickle=0.1,
)
_TINY_FAMILY = Profile(
    pool_pages=(14, 18, 24),
    requests_per_s=6.0,
    faults_per_s=0.4,
    faults=("evict", "flush", "engine", "abort", "transfer"),
    fickle=0.2,
)

_TIERED = Profile(
    loss=0.02,
    delays=0.05,
    faults_per_s=1.5,
    faults=(
        *("storage", "damage", "damage", "flush", "evict", "engine", "daemon", "transfer"),
        *("suspend", "abort", "pin", "flush-one"),
    ),
    longest_trouble_s=1.5,
    slow_posts=0.1,
    failing_posts=0.02,
    doubts=0.3,
    pool_pages=(24, 40, 64),
    requests_per_s=6.0,
    fickle=0.1,
    pulls=0.1,
    tier_objects=(6, 30, 300),
)

_TWO_TIERS = replace(
    _TIERED,
    requests_per_s=10.0,
    pulls=0.2,
    tier_objects=(6, 30, 300),
    has_store_below=True,
)
"""A disk, and below it a store that all nodes share."""

PROFILES = {
    "calm": Profile(
        fickle=0.0, lonely=0.0, pool_pages=(192,), requests_per_s=4.0, deadlines_s=(6.0,)
    ),
    "lossy": Profile(loss=0.1, repeats=0.1, delays=0.2),
    "partition": Profile(
        loss=0.01,
        faults_per_s=0.5,
        faults=("partition", "partition", "isolate", "suspend", "reconnect"),
        stalled_posts=0.01,
    ),
    "away": Profile(
        loss=0.01,
        faults_per_s=0.6,
        faults=("isolate", "isolate", "partition", "transfer", "engine"),
        longest_trouble_s=24.0,
        forget_s=2.0,
        cuts_data=True,
        slow_posts=0.7,
        doubts=0.8,
        requests_per_s=3.0,
    ),
    "crash": Profile(
        repeats=0.02,
        delays=0.05,
        faults_per_s=0.5,
        faults=("engine", "engine", "daemon", "daemon", "transfer", "suspend"),
        slow_posts=0.3,
        doubts=0.5,
    ),
    "transfer": Profile(
        faults_per_s=0.4,
        faults=("transfer", "fence", "agent", "engine"),
        failing_posts=0.05,
        stalled_posts=0.03,
        slow_posts=0.2,
        failing_loads=0.2,
        hanging_loads=0.05,
        doubts=0.7,
    ),
    "fence": Profile(
        loss=0.15,
        faults_per_s=2.0,
        faults=("fence", "fence", "transfer", "partition", "abort"),
        slow_posts=0.3,
        stalled_posts=0.02,
        doubts=0.5,
        pool_pages=(16, 24, 40),
        fickle=0.3,
    ),
    "tiny": Profile(
        pool_pages=(14, 18, 24),
        requests_per_s=16.0,
        faults_per_s=0.3,
        faults=("evict", "flush", "engine", "abort"),
        fickle=0.2,
    ),
    "pins": Profile(
        loss=0.02,
        delays=0.05,
        pool_pages=(14, 24, 40),
        requests_per_s=12.0,
        faults_per_s=3.0,
        faults=("pin", "pin", "pin", "unpin", "evict", "flush", "engine", "abort", "daemon"),
        fickle=0.2,
        pulls=0.2,
    ),
    "storm": Profile(
        loss=0.05,
        repeats=0.05,
        delays=0.15,
        longest_delay_s=0.8,
        faults_per_s=1.0,
        failing_posts=0.04,
        stalled_posts=0.02,
        slow_posts=0.1,
        failing_loads=0.1,
        hanging_loads=0.02,
        doubts=0.6,
        pool_pages=(16, 24, 40),
        fickle=0.12,
        lonely=0.06,
    ),
    "pull": Profile(
        loss=0.05,
        repeats=0.05,
        delays=0.15,
        faults_per_s=0.7,
        slow_posts=0.2,
        failing_posts=0.02,
        doubts=0.5,
        pool_pages=(24, 40, 64),
        fickle=0.15,
        pulls=0.5,
    ),
    "copies": Profile(
        loss=0.02,
        delays=0.05,
        faults_per_s=1.5,
        faults=("engine", "worker", "worker", "deaf", "daemon", "transfer", "evict", "suspend"),
        longest_trouble_s=1.5,
        slow_posts=0.2,
        failing_posts=0.05,
        doubts=0.5,
        pool_pages=(24, 40, 64),
        fickle=0.1,
        copying=0.8,
        device_paths=0.3,
    ),
    "tiers": _TIERED,
    "quotas": replace(
        _TIERED,
        faults=(
            *("storage", "damage", "flush", "evict", "evict", "engine", "daemon", "transfer"),
            *("suspend", "abort", "pin", "flush-one"),
        ),
        failing_posts=0.0,
        doubts=0.0,
        pool_pages=(14, 24, 40),
        requests_per_s=10.0,
        tier_objects=(4, 8, 20),
        has_quotas=True,
    ),
    "store": replace(
        _TIERED,
        faults=(
            *("storage", "damage", "damage", "flush", "engine", "daemon", "transfer"),
            *("evict", "evict", "evict", "stop", "stop", "stop", "suspend", "abort"),
            "flush-one",
        ),
        requests_per_s=10.0,
        pulls=0.3,
        tier_objects=(30, 300),
        shares_tier=True,
    ),
    "both": replace(
        _TWO_TIERS,
        faults=(
            *("storage", "storage", "damage", "damage", "damage", "flush", "engine", "daemon"),
            *("transfer", "evict", "evict", "evict", "stop", "stop", "suspend", "abort", "pin"),
            *("unpin", "flush-one"),
        ),
    ),
    "month": replace(
        _TWO_TIERS,
        faults=(
            *("storage", "storage", "damage", "damage", "damage", "flush", "engine", "daemon"),
            *("daemon", "transfer", "evict", "evict", "stop", "stop", "suspend", "abort", "pin"),
            *("unpin", "epoch"),
        ),
        has_epochs=True,
        burst_s=20.0,
        quiet_s=900.0,
        rests=True,
    ),
    "swa": replace(_OTHER_FAMILY, family="swa", beside_pages=(30, 60)),
    "swa-tiny": replace(_TINY_FAMILY, family="swa", beside_pages=(9, 12, 24)),
    "recurrent": replace(_OTHER_FAMILY, family="recurrent", beside_pages=(6, 16)),
    "recurrent-tiny": replace(_TINY_FAMILY, family="recurrent", beside_pages=(4, 6)),
    "hisparse": replace(
        _OTHER_FAMILY, family="hisparse", beside_pages=(6, 16, 40), failing_loads=0.0
    ),
}
MIXED = "mixed"
DRAWN = sorted(PROFILES.keys() - {"quotas", "store", "both", "month"})
"""By ``mixed``. Profiles that came later are not among them: each seed stays what it was."""
