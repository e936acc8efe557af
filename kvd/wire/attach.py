"""Messages between an engine and its daemon, on the attach socket.

Unix, SOCK_SEQPACKET, one msgpack message a packet: ``Attach`` or ``Join`` in, ``Attached`` or
``Rejected`` out with the memory descriptors as ancillary data. The socket then stays open; its
hang-up is the death of that process, or follows ``Leave``. A hang-up without either frees nothing:
a process that lives may write the pages. What a session says is in ``client``; a process that has
joined says here what it alone knows, each of it answered with ``RankAnswer``: how far its rank has
written (``RankWritten``), that it keeps KV in blocks of its own (``KeepsBlocks``), and when it
copies between those and pages (``CopyWaits``, ``CopyBegins``, ``CopyEnds``).

Each side says which protocol it speaks and of which kvd it is. Both are read by themselves before
the message is (``Speaker``): that of another protocol may be no message here at all.
"""

from __future__ import annotations

from zlib import crc32

import msgspec

from kvd.errors import Code, Refusal
from kvd.wire.bounds import Call, EventHandle, Figure, Name, Reason, SessionKey
from kvd.wire.memory import DeviceMemory, PoolMemory

PROTOCOL = 2
"""Version of both client sockets; whoever hears another one refuses it with both numbers."""


class Speaker(msgspec.Struct, frozen=True):
    """What any message of this socket says of who sent it, whatever else it says.

    ``protocol``: None where it does not say. ``version``: of its kvd; empty where it does not say.
    """

    protocol: Figure | None = None
    version: Name = ""

    @property
    def is_foreign(self) -> bool:
        """Whether it speaks another protocol than we do."""
        return self.protocol not in (None, PROTOCOL)


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Open a session, or be one of before a restart. Answer: ``Attached``, or ``Rejected``."""

    name: str
    protocol: Figure = PROTOCOL
    resumes: bytes = b""
    """The token of a session of before the daemon's restart, to be that session again."""
    leases: tuple[Figure, ...] = ()
    """Of that session: those whose pages the engine still uses. The others are given back."""
    key: SessionKey = ""
    """By which other processes of this user join the session."""
    version: Name = ""
    keeps_blocks: bool = False
    """As ``KeepsBlocks`` says, of a session of before."""
    kind: Name = ""
    """What the engine is, as its connector says: ``vllm 0.32.0``; without one ``kvd.client``."""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Another process of the same session maps the pool too (a tensor-parallel worker).

    By the ``token`` of the session, or by its ``key``: then the answer comes when a process of the
    same user has attached with that key, within ``wait_s``.
    """

    token: bytes = b""
    protocol: Figure = PROTOCOL
    key: SessionKey = ""
    wait_s: float = 0.0
    rank: Figure = 0
    """Of the ``ranks`` that each write a part of every page, the one that this process writes."""
    ranks: Figure = 0
    """0: it says nothing about what is written."""
    version: Name = ""
    keeps_blocks: bool = False
    """It has said ``KeepsBlocks`` to the daemon before this one."""


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """This process writes no page of the pool any more: the hang-up that follows is its word."""


class RankWritten(msgspec.Struct, frozen=True, tag="rank-written"):
    """This process has written its part of a lease so far; as ``SayWritten`` of ``client``."""

    call: Call
    lease: Figure
    upto_tokens: Figure
    after: EventHandle = b""


class KeepsBlocks(msgspec.Struct, frozen=True, tag="keeps-blocks"):
    """KV of this session is computed in blocks of this process, and saved to pages behind that.

    From the answer on no commit and no end of a lease of the session is a word about KV of which
    nothing was said: what is ordered to be saved may not have begun, and nobody here knows of it.
    """

    call: Call


class CopyPart(msgspec.Struct, frozen=True, array_like=True):
    """Pages of one component: ``n_pages`` of the lease's row from ``first_page`` on.

    ``pages_sum`` is ``pages_sum`` of the pages that the order names, which may be others by now.
    """

    component: Name
    first_page: Figure
    n_pages: Figure
    pages_sum: Figure


class CopyBegins(msgspec.Struct, frozen=True, tag="copy-begins"):
    """This process is about to copy between pages of a lease and memory of its own.

    It moves no byte before it is answered without a refusal: from then on the pages are kept for
    the copy until ``CopyEnds``, or until this process is dead.
    """

    call: Call
    lease: Figure
    to_pages: bool
    """A save, which writes the pages; otherwise they are read. A page is saved once, but for
    one that was not full and that nobody is sent: until the save is over none of it is written."""
    parts: tuple[CopyPart, ...]
    upto_tokens: Figure = 0
    """Of a save: KV of the tokens below is in the pages when it is over, from the first of them."""
    device: Name = ""
    """Whose copy engine moves it; empty: this processor."""
    waited: Call = 0
    """The ``call`` of its ``CopyWaits``, which is over; 0: it said none."""


class CopyWaits(msgspec.Struct, frozen=True, tag="copy-waits"):
    """An order to copy waits for a mark of this process, longer than most: whoever asks hears why.

    Nothing is kept for it. It is over with the ``CopyBegins`` that names it, or, where it is given
    up, with ``CopyEnds``. Said to a daemon that ``hears_waits``.
    """

    call: Call
    lease: Figure
    to_pages: bool
    n_pages: Figure
    waited_us: Figure = 0
    """Since it was ordered."""
    left_us: Figure = 0
    """Until it is given up."""
    device: Name = ""


class CopyEnds(msgspec.Struct, frozen=True, tag="copy-ends"):
    """No byte of that copy moves any more; or none ever will, as its mark has not come."""

    call: Call
    copy: Call
    """The ``call`` of its ``CopyBegins``, or of its ``CopyWaits``."""
    is_done: bool
    """All of it is there; otherwise nothing may be assumed of what it wrote."""
    n_bytes: Figure = 0
    waited_us: Figure = 0
    """From the order until its bytes might move: for its mark, and for the daemon's word."""
    moved_us: Figure = 0
    why: Reason = ""
    """It is not done."""
    mark_us: Figure = 0
    """Of ``waited_us``, until its mark had come."""


class RankAnswer(msgspec.Struct, frozen=True, tag="rank-answer"):
    """What became of what a process said. ``refusal`` None: it counts."""

    call: Call
    refusal: Refusal | None = None


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """The session exists. ``route`` is the ZMQ routing id that binds the client socket to it.

    ``max_frame_bytes``: the client socket drops the connection of whoever sends a longer frame.
    """

    session: int
    token: bytes
    node: str
    incarnation: str
    pools: tuple[PoolMemory, ...]
    max_frame_bytes: int = 16 * 1024 * 1024
    leases: tuple[Figure, ...] = ()
    """Of those asked for, the ones that the daemon still keeps; they can be released."""
    route: bytes = b""
    """The token itself; after a restart another one, so that what was on its way before is void."""
    devices: tuple[DeviceMemory, ...] = ()
    """What lies on devices: these are opened, no descriptors are passed for them."""
    protocol: Figure = PROTOCOL
    version: Name = ""
    endpoint: str = ""
    """Where its client socket is; empty where it does not say."""
    socket_file: tuple[int, int] | None = None
    """Device and inode of that socket, which are the same by whatever path it is reached."""
    hears_waits: bool = False
    """It takes ``CopyWaits``."""


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """No session, or none any more.

    To a process that is not attached it is the last word before the socket is closed. One that is
    attached is served no more; its socket stays open until it says ``Leave`` or ends, and so long
    what it may write stays held.
    """

    refusal: Refusal
    protocol: Figure = PROTOCOL
    version: Name = ""


ProcessWord = RankWritten | KeepsBlocks | CopyWaits | CopyBegins | CopyEnds
"""What an attached process says and is answered."""

AttachRequest = Attach | Join | Leave | ProcessWord
AttachReply = Attached | Rejected | RankAnswer


def pages_sum(pages: bytes) -> int:
    """A check of page numbers, as ``kvd.types.Pages`` packs them: other ones have another sum."""
    return crc32(pages)


def versions_differ(*, client: Speaker, daemon: Speaker, node: str, side: str) -> Refusal:
    """Why a client and a daemon of different protocols do not talk: the same from either side."""
    fix = "install the same version of kvd on both sides"
    if client.version and daemon.version and client.version != daemon.version:
        fix = (
            f"install kvd {daemon.version} in the engine's environment, or kvd {client.version} on "
            "the node and restart its daemon"
        )
    return Refusal(
        Code.VERSIONS_DIFFER,
        f"the client is {_called(client)}, {node} is {_called(daemon)}: {fix}",
        side=side,
        numbers={"client": client.protocol or 0, "daemon": daemon.protocol or 0},
    )


def _called(speaker: Speaker) -> str:
    kvd = f"kvd {speaker.version}" if speaker.version else "a kvd of unknown version"
    return f"{kvd}, which speaks protocol {speaker.protocol}"
