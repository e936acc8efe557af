"""How engines reach kvd: sessions, leases and handoffs, asynchronous and blocking.

Importing this loads msgspec and numpy, and neither libzmq nor torch: that comes with the first
tensor view.
"""

from kvd.client.answers import FlushResult, Matched, PinnedPrefix
from kvd.client.api import Connecting, Node, connect
from kvd.client.arena import PageArena
from kvd.client.handoff import (
    ArrivingPages,
    KeptRoom,
    Outcome,
    Receive,
    Send,
    Share,
    Taken,
    room_of,
)
from kvd.client.lease import Fetched, Lease, Resumption, Retraction
from kvd.client.lease_key import LeaseKey
from kvd.client.mover.blocks import EngineBlocks
from kvd.client.mover.engine_memory import LayerMemory
from kvd.client.mover.pending_copy import PendingCopy
from kvd.client.pending import PendingCall
from kvd.client.pool import Pool
from kvd.client.prompt import Prompt
from kvd.client.rank_words import PendingWord
from kvd.client.state import EventsLost, LeaseTiers
from kvd.client.sync import (
    SyncArena,
    SyncArenaReceive,
    SyncEvents,
    SyncLease,
    SyncNode,
    SyncReceive,
    SyncSend,
    connect_sync,
)
from kvd.client.worker import Worker, join
from kvd.errors import Code, HandoffError, KvdError

__all__ = [
    "ArrivingPages",
    "Code",
    "Connecting",
    "EngineBlocks",
    "EventsLost",
    "Fetched",
    "FlushResult",
    "HandoffError",
    "KeptRoom",
    "KvdError",
    "LayerMemory",
    "Lease",
    "LeaseKey",
    "LeaseTiers",
    "Matched",
    "Node",
    "Outcome",
    "PageArena",
    "PendingCall",
    "PendingCopy",
    "PendingWord",
    "PinnedPrefix",
    "Pool",
    "Prompt",
    "Receive",
    "Resumption",
    "Retraction",
    "Send",
    "Share",
    "SyncArena",
    "SyncArenaReceive",
    "SyncEvents",
    "SyncLease",
    "SyncNode",
    "SyncReceive",
    "SyncSend",
    "Taken",
    "Worker",
    "connect",
    "connect_sync",
    "join",
    "room_of",
]
