"""Checks of peers: how they are told apart, who is there, and whether their pools are alike.

No secret is shown: the public key is, because the other side must have it. A running daemon knows
its peers: it is asked. Without one, each peer is asked by a Ping of nobody that it knows; it
answers that with its Hello, and keeps nothing but one refused message in its counters. Never a
Hello in this node's name: that would tell the peer that the daemon before is gone.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from kvd.cli.doctor.finding import DoctorFinding, Subject, good, poor, wrong
from kvd.cli.doctor.service import running
from kvd.config.address import tcp_address
from kvd.config.pool import pool_spec
from kvd.core.peers.allowed import allowed_by_name
from kvd.core.peers.compatibility import layout_match
from kvd.curve import KeyFlaw, read_pair
from kvd.errors import Refusal
from kvd.sockets import is_ipv6, open_dealer
from kvd.text import clean
from kvd.wire.codec import PEER_MESSAGES
from kvd.wire.peer import PROTOCOL, Hello, Ping, Reject

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.config.schema import Config
    from kvd.curve import KeyPair
    from kvd.wire.snapshot import PeerState

CONNECT_S = 1.0
HANDSHAKE_MS = 2000
"""A handshake that takes longer is given up. One with a key that is not listed ends only then."""
HELLO_S = HANDSHAKE_MS / 1e3 + 0.5
"""A refused handshake ends after ``HANDSHAKE_MS``."""
AHEAD_S = 5.0
"""A peer born later than now by more than this has another clock."""

SAME = "same"
ONE_WAY = "cut on the way"
"""In what a daemon says of a layout: equal, or different in page size alone."""
_ALIKE = "make [pool] equal on both; see each with: kvd config show"

OURS, THEIRS = "asked the running daemon", "asked the peer itself, by a Ping"


class ConfiguredPeer(msgspec.Struct, frozen=True):
    """A configured peer: its name here, and its address."""

    name: str
    address: str


def neighbours(subject: Subject) -> list[DoctorFinding]:
    """What the running daemon says of each configured peer, or what the peer says itself."""
    wanted = [ConfiguredPeer(*pair) for pair in subject.config.peers.connect.items()]
    if not wanted:
        return []
    known = _known(subject)
    if known is not None:
        return [_as_known(peer, known.get(peer.name)) for peer in wanted]
    secret = subject.config.peers.secret_key_file
    own = None if secret is None else read_pair(Path(secret))
    if isinstance(own, KeyFlaw):
        return []  # said by the check of the keys
    with zmq.Context() as context, contextlib.ExitStack() as opened:
        asked = []
        for peer in wanted:
            dealer = opened.enter_context(open_dealer(context))
            if own is not None:
                be_client(dealer, own, subject.config.peers.keys[peer.name])
            asked.append((peer, dealer, opened.enter_context(_ask(dealer, peer))))
        reached_s = time.monotonic() + CONNECT_S
        end_s = time.monotonic() + HELLO_S
        found: list[DoctorFinding] = []
        for peer, dealer, monitor in asked:
            if not monitor.poll(_until_ms(reached_s)):
                found.append(_unreached(peer))
                continue
            found += _heard(subject, peer, _answer(dealer, end_s), is_keyed=own is not None)
    return found


def be_client(dealer: zmq.Socket[bytes], own: KeyPair, server: str) -> None:
    """Make it talk only to the holder of the public key ``server``; before it connects."""
    dealer.setsockopt(zmq.CURVE_SERVERKEY, server.encode())
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
    dealer.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
    dealer.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


# ---- as the running daemon knows them ------------------------------------------------------------


def _known(subject: Subject) -> dict[str, PeerState] | None:
    """The peers of the running daemon by name; None where none runs."""
    shot = running(subject)
    return None if shot is None else {peer.name: peer for peer in shot.peers}


def _as_known(configured: ConfiguredPeer, peer: PeerState | None) -> DoctorFinding:
    check = f"peer {configured.name}"
    if peer is None:
        what = f"the running daemon does not know it ({OURS})"
        return poor(check, what, "systemctl restart kvd: it was configured after the start")
    if peer.state != "up":
        why = f": {clean(peer.trouble)}" if peer.trouble else ""
        fix = f"on its host: kvd status; from here: nc -vz {_spaced(configured.address)}"
        return poor(check, f"{configured.address} is {clean(peer.state)}{why} ({OURS})", fix)
    if peer.layout != SAME:
        make = poor if ONE_WAY in peer.layout else wrong
        return make(check, f"{clean(peer.layout)} ({OURS})", _ALIKE)
    if peer.epochs:
        what, _, fix = clean(peer.epochs).partition("; ")
        return poor(check, f"{what} ({OURS})", fix)
    if peer.slow_path:
        what, _, fix = clean(peer.slow_path).partition(": keep ")
        return poor(check, f"{what} ({OURS})", f"keep {fix}")
    took = f"{peer.round_trip_ms:.1f} ms round trip"
    return good(check, f"up, {took}, pools are laid out alike ({OURS})")


# ---- as they say themselves ----------------------------------------------------------------------


@contextlib.contextmanager
def _ask(dealer: zmq.Socket[bytes], peer: ConfiguredPeer) -> Iterator[zmq.Socket[bytes]]:
    """Send the Ping; what is given becomes readable when the peer takes the connection.

    No connection is made and dropped to see: the peer would report somebody who hangs up.
    """
    if is_ipv6(peer.address):
        dealer.setsockopt(zmq.IPV6, 1)
    monitor = dealer.get_monitor_socket(zmq.EVENT_CONNECTED)
    try:
        dealer.connect(peer.address)
        # An incarnation that no daemon has or will have, and older than each: no Hello carries it.
        nobody = "0" * 16 + secrets.token_hex(8)
        ping = Ping(source=nobody, target="", number=1, echo=0, offer_floor=0, settled_floor=0)
        dealer.send(PEER_MESSAGES.encode(ping))
        yield monitor
    finally:
        dealer.disable_monitor()
        monitor.close(linger=0)


def _unreached(peer: ConfiguredPeer) -> DoctorFinding:
    """Why nobody takes the connection, as the kernel says it to a plain one."""
    check = f"peer {peer.name}"
    place = tcp_address(peer.address)
    assert place is not None, "the configuration is valid"
    why, fix = "no answer", f"start kvd there, or look at the way: nc -vz {_spaced(peer.address)}"
    try:
        socket.create_connection((place.host, place.port), CONNECT_S).close()
    except socket.gaierror as exc:
        why = exc.strerror or "its name is not known"
        fix = f"getent hosts {place.host}; or use its IP address in peers.connect.{peer.name}"
    except OSError as exc:
        why = exc.strerror or str(exc) or why
    return poor(check, f"{peer.address} cannot be reached: {why}", fix)


def _answer(dealer: zmq.Socket[bytes], end_s: float) -> Hello | Reject | Refusal | None:
    """The first Hello or Reject that comes, or why it cannot be read; None for silence."""
    while dealer.poll(_until_ms(end_s)):
        message = PEER_MESSAGES.decode(dealer.recv_multipart()[-1])
        if isinstance(message, Hello | Reject | Refusal):
            return message
    return None


def _until_ms(end_s: float) -> int:
    return max(0, int((end_s - time.monotonic()) * 1e3))


def _heard(
    subject: Subject,
    peer: ConfiguredPeer,
    answer: Hello | Reject | Refusal | None,
    *,
    is_keyed: bool,
) -> list[DoctorFinding]:
    check = f"peer {peer.name}"
    match answer:
        case None:
            return [_silent(check, peer, is_keyed=is_keyed)]
        case Refusal():
            fix = "run the same kvd on both: kvd --version"
            return [wrong(check, f"{peer.address} cannot be read: {clean(answer.message)}", fix)]
        case Reject(refusal=refusal):
            fix = f"on its host: kvd events, and see peers.keys and peers.allow there ({THEIRS})"
            return [wrong(check, f"{peer.address} refuses: {clean(refusal.message)}", fix)]
        case Hello():
            return [_hello(subject, check, peer, answer), *_its_clock(check, answer)]


def _silent(check: str, peer: ConfiguredPeer, *, is_keyed: bool) -> DoctorFinding:
    what = f"{peer.address} takes connections and says no Hello within {HELLO_S:.1f} s"
    if is_keyed:
        fix = (
            f"its key must be that of peers.keys.{peer.name} here, and ours must be in peers.keys "
            "there: kvd doctor shows the public key of each node"
        )
        return wrong(check, f"{what}: the keys differ, or it has none", fix)
    fix = f"is that kvd, and does it want keys? On its host: kvd doctor, kvd config show ({THEIRS})"
    return wrong(check, what, fix)


def _hello(subject: Subject, check: str, peer: ConfiguredPeer, hello: Hello) -> DoctorFinding:
    if hello.protocol != PROTOCOL:
        what = f"speaks peer protocol {hello.protocol}, this kvd speaks {PROTOCOL} ({THEIRS})"
        return wrong(check, what, "install the same kvd on both: kvd --version")
    if hello.node != peer.name:
        what = f"{peer.address} calls itself {clean(hello.node[:64])} ({THEIRS})"
        fix = f"rename peers.connect.{peer.name} here, or set node.name = '{peer.name}' there"
        return wrong(check, what, fix)
    here = subject.config.node.name
    match_ = layout_match(pool_spec(subject.config), hello.layout, here, peer.name)
    if match_.sending is None and match_.receiving is None:
        return good(check, f"speaks protocol {PROTOCOL}, pools are laid out alike ({THEIRS})")
    refusal = match_.sending or match_.receiving
    assert refusal is not None
    said = f"{clean(refusal.message)} ({THEIRS})"
    if match_.sending is None or match_.receiving is None:
        return poor(check, said, _ALIKE)
    return wrong(check, said, _ALIKE)


def _its_clock(check: str, hello: Hello) -> list[DoctorFinding]:
    """Its incarnation begins with its birth: one that lies ahead tells of two clocks."""
    try:
        ahead_s = int(hello.source[:16], 16) / 1e9 - time.time()
    except ValueError:
        return []
    if ahead_s < AHEAD_S:
        return []
    what = f"it was started {ahead_s:.0f} s from now, by its clock: one of the two is wrong"
    return [poor(f"{check} clock", what, "on both hosts: timedatectl set-ntp true")]


def _spaced(address: str) -> str:
    """``HOST PORT``, as ``nc`` wants it."""
    place = tcp_address(address)
    return f"{place.host} {place.port}" if place is not None else address


# ---- keys, their files, and who is listed -------------------------------------------------------


_MAKE_KEYS = "run kvd keygen on every node, and set peers.secret_key_file and peers.keys"


def peer_keys(subject: Subject) -> list[DoctorFinding]:
    """Whether peers prove who they are, and with which files."""
    config = subject.config
    path = config.peers.secret_key_file
    if path is None and config.peers.insecure:
        what = "neither authenticated nor encrypted: peers.insecure = true lets anyone be any node"
        return [poor("peers", what, f"{_MAKE_KEYS}; then remove peers.insecure")]
    if path is None:
        what = "without keys, on loopback only: any user of this host may be any node"
        return [good("peers", what)]
    if not zmq.has("curve"):
        fix = "pip install --force-reinstall pyzmq, whose wheels have it"
        return [wrong("peers", "this libzmq was built without CURVE", fix)]
    return [*_files(Path(path)), *_listed(config)]


def _files(path: Path) -> list[DoctorFinding]:
    """The configuration is valid, so the secret could be read a moment ago."""
    own, mode = read_pair(path), stat.S_IMODE(path.stat().st_mode)
    if isinstance(own, KeyFlaw):
        out = [wrong("peer key", f"{path} {own.rule}", own.fix)]
    else:
        out = [good("peer key", f"{path}, mode {mode:04o}, public key {own.public}")]
    folder = path.parent
    mode = folder.stat().st_mode
    where = f"{folder} has mode {stat.S_IMODE(mode):04o}: anyone may put another key there"
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        return [*out, wrong("peer key directory", where, f"chmod o-w {folder}")]
    return [*out, good("peer key directory", f"{folder}, mode {stat.S_IMODE(mode):04o}")]


def _listed(config: Config) -> list[DoctorFinding]:
    """Whom the configuration lists; a dialed or allowed peer without a key makes it invalid."""
    peers = config.peers
    others = [name for name in peers.keys if name != config.node.name]
    if not others:
        what = "peers.keys lists no other node, so nobody can connect"
        return [poor("peers", what, "list the public key of every peer in peers.keys")]
    out = [good("peers", f"authenticated and encrypted; {len(others)} listed: {', '.join(others)}")]
    allowed = allowed_by_name(peers.allow)
    shut_out = [name for name in others if allowed and name not in allowed]
    if shut_out:
        what = (
            f"{', '.join(shut_out)}: has a key, and is refused because peers.allow has other names"
        )
        out.append(poor("peers.allow", what, "add it to peers.allow, or remove its key"))
    return out
