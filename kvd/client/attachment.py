"""Our end of the attach socket: what it told us, the memory it passed, and its hang-up.

Nothing here waits: who calls waits for the descriptor to become readable, on a loop or with poll.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import select
import socket
import stat
import struct
import termios
import weakref
from typing import TYPE_CHECKING, Final, Protocol

from msgspec.structs import replace

from kvd import __version__
from kvd.client.endpoint import socket_path
from kvd.errors import Code, KvdError, Number, Refusal
from kvd.wire.attach import (
    PROTOCOL,
    Attach,
    Attached,
    Join,
    Leave,
    RankAnswer,
    Rejected,
    Speaker,
    versions_differ,
)
from kvd.wire.codec import ATTACH_REPLIES, ATTACH_REQUESTS, SPEAKERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvd.wire.attach import ProcessWord
    from kvd.wire.memory import ComponentMemory, DeviceMemory, PoolMemory

ATTACH_WITHIN_S: Final = 10.0
"""A daemon that has not answered by then is not going to."""

_SMALL_REQUEST_BYTES: Final = 64 * 1024
_REQUEST_BUFFER_BYTES: Final = 1024 * 1024
"""Asked for where many leases are named; Linux grants up to twice its limit, 416 KiB at least."""

_MAX_REPLY_BYTES: Final = 4 * 1024 * 1024
_WORD_BYTES: Final = 64 * 1024
"""Of what an attached process hears: a refusal at most."""

_PEER: Final = struct.Struct("3i")
"""pid, uid and gid."""

_MAX_DESCRIPTORS: Final = 253
"""SCM_MAX_FD of Linux."""


class CopiesUnderWay(Protocol):
    """What this process copies to and from the pages of its session."""

    has_blocks: bool
    """Whether it keeps KV in blocks of its own."""

    @property
    def is_quiet(self) -> bool:
        """Whether the daemon keeps no page for any of it."""
        ...

    @property
    def doubt(self) -> Refusal | None:
        """Why nobody can tell whether some of it still moves; None while that can be told."""
        ...


class Attachment:
    """One process of a session. Closing it, or dying, ends that process' part in it.

    ``is_own``: whether this is the process that attached, and none that was forked from it.
    """

    def __init__(self, sock: socket.socket, attached: Attached, fds: list[int]) -> None:
        """Take over the socket and the descriptors: as ``wire.memory`` says."""
        self.attached = attached
        self.endpoint = ""
        """What was asked for, as ``require_socket`` was told."""
        self.copies: CopiesUnderWay | None = None
        """What has to be over before this process goes back to a daemon that was restarted."""
        self.key = ""
        """By which others join; the process that connected with it says it again at each return."""
        self.kind = ""
        """What the engine is; said again too."""
        self._fds = fds
        self._pid = os.getpid()
        self.is_own = True
        _OPEN.add(self)
        self._take(sock)

    def _take(self, sock: socket.socket) -> None:
        self._sock = sock
        news = select.poll()
        news.register(sock, select.POLLIN)
        self.has_news: Callable[[int], object] = news.poll
        """Whether ``last_word`` may have one; it takes how long to wait for it. Every call asks."""

    def require(self, expects: Mapping[str, str | int] | None) -> None:
        """Leave where a pool is not what this engine says that it needs.

        Raises:
            KvdError: ``layout-mismatch`` with what the pool has and what was expected,
                ``bad-request`` for a key that is not one of ``EXPECTED``.
        """
        try:
            _require(self.attached, expects or {})
        except KvdError:
            self.close()
            raise

    def require_socket(self, endpoint: str) -> None:
        """Leave where this is the daemon of another client socket than the one that was asked for.

        The attach socket is found by its directory. So it may be that of a daemon whose client
        socket has another name there, with another pool.

        Raises:
            KvdError: ``unreachable`` with both.
        """
        self.endpoint = endpoint
        if not _is_at(self.attached, endpoint):
            self.close()
            raise _failure(
                Code.UNREACHABLE,
                f"nobody listens at {endpoint}: the attach socket beside it is of "
                f"{self.attached.node}, whose client socket is {self.attached.endpoint}; name that "
                "one, or start the other daemon with its sockets in a directory of its own",
            )

    @contextlib.contextmanager
    def or_left(self) -> Iterator[None]:
        """Leave the session where the block, which makes something of it, does not come to its end.

        Raises:
            KvdError: ``unreachable`` where no descriptor was left for it.
        """
        try:
            yield
        except BaseException as exc:
            self.close()
            if isinstance(exc, OSError) and exc.errno in {errno.EMFILE, errno.ENFILE}:
                why = "no descriptor is left here for a session: raise ulimit -n"
                raise _failure(Code.UNREACHABLE, why) from exc
            raise

    def fileno(self) -> int:
        """Readable when the daemon hung up."""
        return self._sock.fileno()

    @property
    def route(self) -> bytes:
        """The routing id of this session on the client socket."""
        return self.attached.route or self.attached.token

    def memory_fd(self, pool: str, component: str, shard: int = 0) -> int:
        """The descriptor of one component's memory, of one shard of it; it stays ours.

        Raises:
            KvdError: ``bad-request`` when there is no such component or shard, or it has no bytes;
                ``wrong-state`` after ``close``.
        """
        self.require_open()
        names = [(pool.name, part.name, number) for pool, part, number in _memories(self.attached)]
        for name, fd in zip(names, self._fds, strict=True):
            if name == (pool, component, shard):
                return fd
        known = ", ".join(dict.fromkeys(f"{pool}.{part}" for pool, part, _ in names))
        which = f"shard {shard} of {pool}.{component}" if shard else f"{pool}.{component}"
        raise _failure(Code.BAD_REQUEST, f"{which} has no memory here; there is: {known or 'none'}")

    def require_open(self) -> None:
        """Refuse what needs the memory, or the right to its pages, once this process has left.

        Raises:
            KvdError: ``wrong-state`` after ``close``.
        """
        if self._sock.fileno() < 0:
            why = "this session was closed: none of its pages is this process's; map memory before"
            raise _failure(Code.WRONG_STATE, why)

    def on_device(self, pool: str, component: str, shard: int) -> DeviceMemory | None:
        """Where the memory lies of which no descriptor was passed; None for host memory."""
        wanted = pool, component, shard
        for device in self.attached.devices:
            if (device.pool, device.component, device.shard) == wanted:
                return device
        return None

    def require_own(self) -> None:
        """Refuse what uses the sockets, in a process that was forked from the one that attached.

        Both would read one socket, and each would take answers of the other.

        Raises:
            KvdError: ``wrong-state``.
        """
        if not self.is_own:
            raise KvdError(_forked(self._pid))

    def has_hung_up(self) -> bool:
        """Whether the daemon has, whoever else looks or reads; says nothing of why."""
        fd = self._sock.fileno()
        if fd < 0:
            return True
        look = select.poll()
        look.register(fd, select.POLLRDHUP)
        return bool(look.poll(0))

    def is_daemon_stopped(self) -> bool:
        """Whether the process that listens there is stopped: by a signal, or by a debugger.

        False where that cannot be seen: in another pid namespace, or where systemd listens for it.
        """
        try:
            told = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            with open(f"/proc/{_PEER.unpack(told)[0]}/stat", "rb") as stat_file:
                fields = stat_file.read(512)
        except OSError:
            return False
        # Behind the name, which may hold anything.
        return fields.rpartition(b")")[2].split()[:1] in ([b"T"], [b"t"])

    def last_word(self) -> Refusal | None:
        """Why the daemon hung up; None while it has not, which takes 2 us to see at most."""
        if not self.has_news(0):
            return None
        word = self.hear()
        return word if isinstance(word, Refusal) else None

    def say(self, word: ProcessWord) -> None:
        """Send a word of this process.

        Raises:
            OSError: the daemon does not read, or is gone.
        """
        self._sock.send(ATTACH_REQUESTS.encode(word))

    def hear(self) -> RankAnswer | Refusal | None:
        """What has come: the answer to a word, or why the daemon hung up; None where nothing has.

        A hang-up is read again and again. A word of a later version says nothing to this one.
        """
        while True:
            try:
                packet = self._sock.recv(_WORD_BYTES)
            except BlockingIOError:
                return None
            except OSError:
                break
            reply = ATTACH_REPLIES.decode(packet) if packet else None
            if isinstance(reply, RankAnswer):
                return reply
            if isinstance(reply, Rejected):
                return reply.refusal
            if not packet:
                break
        return Refusal(
            Code.UNREACHABLE,
            f"{self.attached.node} hung up: the daemon ended or was restarted, and what it was "
            "asked ended with it; leases keep their pages and can be released, and this node comes "
            "back by itself when the daemon does: ask again",
            side="client",
        )

    @property
    def files(self) -> frozenset[tuple[int, int]]:
        """By device and inode, those that its memory is in: a later daemon may find them too."""
        found = [os.fstat(fd) for fd in self._fds]
        return frozenset((each.st_dev, each.st_ino) for each in found if each.st_nlink)

    def difference(self, other: Attachment) -> str:
        """What is not the same memory in what ``other`` was passed; empty where all of it is."""
        if other.attached.pools != self.attached.pools:
            return "its pools are laid out otherwise now"
        if other.attached.devices != self.attached.devices:
            return "its pool is other memory now"
        for mine, theirs in zip(self._fds, other._fds, strict=True):
            here, there = os.fstat(mine), os.fstat(theirs)
            if (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino):
                return "its pool is other memory now"
            if here.st_size != there.st_size:
                return f"its memory has {there.st_size} bytes now, it had {here.st_size}"
        return ""

    def renew(self, other: Attachment) -> None:
        """Go on with the socket of ``other``, which is closed otherwise: its memory is the same."""
        # In this order, as other threads look meanwhile: a key of before is refused from the first
        # line on, and no instant is without a socket, which would be that of a closed session.
        self.attached, before = other.attached, self._sock
        self._take(other._sock)
        before.close()
        for fd in other._fds:
            os.close(fd)

    def close(
        self,
        *,
        says_leave: bool = True,
        unheard: Callable[[socket.socket | None], None] | None = None,
    ) -> None:
        """Leave the session; repeatable. Mappings stay valid, to be read at most.

        A forked child that closes its copy does not speak for the process that attached. Without
        ``says_leave`` it is heard that this process is done with the pool when it has ended.
        ``unheard`` takes over what is left to see to: the connection where that is said and may not
        be read yet, or None where it cannot be said there any more.
        """
        if self._sock.fileno() >= 0 and self.is_own and says_leave:
            is_said = leave(self._sock)
            if unheard is not None:
                unheard(_over(self._sock) if is_said else None)
        self._sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds = []


_OPEN: Final[weakref.WeakSet[Attachment]] = weakref.WeakSet()


def _forget_parents() -> None:
    """In a forked child: it has attached to nothing yet."""
    for attachment in list(_OPEN):
        attachment.is_own = False


# Not the process id, which each call would ask the kernel for several times.
os.register_at_fork(after_in_child=_forget_parents)


EXPECTED: Final[Mapping[str, Callable[[PoolMemory], str | int]]] = {
    "family": lambda pool: pool.family,
    "order": lambda pool: pool.order,
    "interior": lambda pool: pool.interior,
    "tag": lambda pool: pool.tag,
    "page_size": lambda pool: pool.components[0].page_size,
}
"""Keys of [pool] that an engine may expect a value of: what its own copies depend on."""


def _require(attached: Attached, expects: Mapping[str, str | int]) -> None:
    unknown = [key for key in expects if key not in EXPECTED]
    if unknown:
        known = ", ".join(EXPECTED)
        raise _failure(
            Code.BAD_REQUEST, f"expects has {unknown[0]!r}; an engine may expect {known}"
        )
    for pool in attached.pools:
        found = {key: EXPECTED[key](pool) for key in expects}
        wrong = [key for key, wanted in expects.items() if found[key] != wanted]
        if not wrong:
            continue
        words = "; ".join(
            f"pool.{key} is {found[key]!r} there, this engine expects {expects[key]!r}"
            for key in wrong
        )
        numbers: dict[str, Number] = {}
        for key in wrong:
            numbers |= {key: found[key], f"expected_{key}": expects[key]}
        why = (
            f"pool {pool.name} of {attached.node} is not what this engine writes and reads: "
            f"{words}; configure [pool] of {attached.node} for this engine, or start the engine "
            "that this pool is for"
        )
        raise KvdError(Refusal(Code.LAYOUT_MISMATCH, why, side="client", numbers=numbers))


def _is_at(attached: Attached, endpoint: str) -> bool:
    """Whether that daemon's client socket is the one at ``endpoint``, by whatever path."""
    if not attached.endpoint or not endpoint:
        return True  # an older daemon does not say
    asked, theirs = socket_path(endpoint), socket_path(attached.endpoint)
    if os.path.realpath(asked) == os.path.realpath(theirs):
        return True
    try:
        found = os.stat(asked)
    except OSError:
        return False
    return attached.socket_file == (found.st_dev, found.st_ino)


def dial(path: str, *, wait_s: float = 0.0) -> socket.socket | None:
    """A non-blocking socket connected to the daemon at ``path``.

    Args:
        path: of the attach socket.
        wait_s: blocks so long at most when the daemon's queue of connections is full.

    Returns:
        None when that queue is still full.

    Raises:
        KvdError: ``unreachable``; the message says what is wrong and what to do.
    """
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as exc:
        raise _failure(Code.UNREACHABLE, _why_not(path, exc)) from exc
    try:
        if wait_s:
            timeval = struct.pack("ll", int(wait_s), int(wait_s % 1 * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        else:
            sock.settimeout(0)
        sock.connect(path)
        sock.settimeout(0)
    except BlockingIOError:
        sock.close()
        return None
    except OSError as exc:
        sock.close()
        raise _failure(Code.UNREACHABLE, _why_not(path, exc)) from exc
    return sock


def ask(sock: socket.socket, request: Attach | Join) -> None:
    """Send the one request. A hang-up is found when the answer is read.

    Raises:
        KvdError: ``too-large`` when it names more leases than fit into one packet.
    """
    request = replace(request, version=__version__)
    if isinstance(request, Attach) and not request.kind:
        request = replace(request, kind=f"kvd.client {__version__}")
    packet = ATTACH_REQUESTS.encode(request)
    if len(packet) > _SMALL_REQUEST_BYTES:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REQUEST_BUFFER_BYTES)
    try:
        sock.send(packet)
    except OSError as exc:
        if exc.errno == errno.EMSGSIZE:
            why = f"a request of {len(packet)} bytes does not fit into a packet of this system"
            raise _failure(Code.TOO_LARGE, why) from exc


def take_answer(sock: socket.socket) -> Attachment | None:
    """The attachment; None when the answer has not come yet. Takes the socket over on success.

    Raises:
        KvdError: the daemon refused, hung up, or answered nonsense; ``versions-differ`` when it
            speaks another protocol.
    """
    space = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
    try:
        packet, passed, flags, _ = sock.recvmsg(_MAX_REPLY_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        return None
    except OSError:
        packet, passed, flags = b"", [], 0
    fds = array.array("i")
    for level, kind, content in passed:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    try:
        attached = _read_answer(packet)
        if flags & socket.MSG_CTRUNC:
            why = (
                "no descriptor is left here for the memory that the daemon passes: raise ulimit -n"
            )
            raise _failure(Code.UNREACHABLE, why)
        _check_memory(attached, list(fds))
    except KvdError:
        for fd in fds:
            os.close(fd)
        raise
    return Attachment(sock, attached, list(fds))


def _forked(pid: int) -> Refusal:
    """Why this process has no part in a session: ``pid`` attached, and this one is a fork of it."""
    return Refusal(
        Code.WRONG_STATE,
        f"this process ({os.getpid()}) was forked from the one that attached ({pid}), and two "
        "processes cannot share the sockets of a session: connect or join here, after the fork",
        side="client",
        numbers={"pid": pid},
    )


def leave(sock: socket.socket) -> bool:
    """Say that this process writes no page any more; whether somebody may read it."""
    try:
        sock.send(ATTACH_REQUESTS.encode(Leave()))
    except OSError:
        return False
    return True


def _over(sock: socket.socket) -> socket.socket:
    """The same connection, to see whether what was said is read; the daemon sees it end now."""
    # No descriptor more: a process that has none left can leave too.
    kept = socket.socket(fileno=sock.detach())
    # Whoever connects next by the key of this session must find it free.
    with contextlib.suppress(OSError):
        kept.shutdown(socket.SHUT_RDWR)
    return kept


def is_heard(sock: socket.socket) -> bool | None:
    """Whether the daemon has read all that was said; None: not yet, False: it never will.

    Ask it once more only where it was None.
    """
    # In this order: the kernel notes that a daemon died without reading it, then drops it.
    unread = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        return False
    return None if unread else True


def too_late(path: str, within_s: float = ATTACH_WITHIN_S) -> KvdError:
    """The error for a daemon that accepted the connection and then said nothing."""
    return _failure(
        Code.UNREACHABLE,
        f"the daemon at {path} gave no answer for {within_s:g} s: it is stopped or "
        "overloaded; look at `kvd status`",
    )


def _read_answer(packet: bytes) -> Attached:
    if not packet:
        raise _failure(Code.UNREACHABLE, "the daemon hung up without an answer: read its log")
    # Before the answer itself: a refusal comes as it is, and what else another version says may be
    # no answer here.
    daemon = SPEAKERS.decode(packet)
    answer = ATTACH_REPLIES.decode(packet)
    if isinstance(daemon, Speaker) and daemon.is_foreign and not isinstance(answer, Rejected):
        client = Speaker(PROTOCOL, __version__)
        raise KvdError(
            versions_differ(client=client, daemon=daemon, node="the daemon", side="client")
        )
    match answer:
        case Attached():
            return answer
        case Rejected(refusal) | (Refusal() as refusal):
            raise KvdError(refusal)
        case RankAnswer():
            raise _failure(Code.INTERNAL, "the daemon answered a word that nobody has said")


def _memories(attached: Attached) -> Iterator[tuple[PoolMemory, ComponentMemory, int]]:
    """Each memory that a descriptor is passed for, in that order: a component and its shard."""
    elsewhere = {(device.pool, device.component, device.shard) for device in attached.devices}
    for pool in attached.pools:
        for part in pool.components:
            if part.total_bytes:
                for shard in range(max(1, len(part.shards))):
                    if (pool.name, part.name, shard) not in elsewhere:
                        yield pool, part, shard


def _check_memory(attached: Attached, fds: list[int]) -> None:
    """Refuse descriptors that do not hold what the description says."""
    parts = [part for _, part, _ in _memories(attached)]
    if len(parts) != len(fds):
        raise _failure(
            Code.INTERNAL, f"{attached.node} described {len(parts)} memories and passed {len(fds)}"
        )
    for part, fd in zip(parts, fds, strict=True):
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size < part.total_bytes:
            raise _failure(
                Code.INTERNAL,
                f"{attached.node} passed {found.st_size} bytes for {part.name}, which has "
                f"{part.total_bytes}",
            )


def _why_not(path: str, exc: OSError) -> str:
    match exc:
        case FileNotFoundError():
            return f"no daemon at {path}: start it (`systemctl start kvd`), or name its endpoint"
        case ConnectionRefusedError():
            return f"nobody listens on {path} any more: the daemon ended; start it again"
        case PermissionError():
            return f"permission denied on {path}: join the group of the socket (usually kvd)"
        case _:
            return f"{path} cannot be reached: {exc.strerror}"


def _failure(code: Code, message: str) -> KvdError:
    return KvdError(Refusal(code, message, side="client"))
