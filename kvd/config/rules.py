"""What a value must be beyond its type, and what values must be to each other.

``flaw_of`` judges one text by its key. ``RULES`` judge a whole configuration; each is declared
``over`` the keys that it reads, so that ``load`` can skip it when one of them is wrong already and
every other finding still comes out in the same run. Those over [pool] are ``pool_rules``. Invalid
entries of tables are left out before they are judged.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvd.config.address import attach_path, host_port, ipc_path, tcp_address
from kvd.config.host import has_group
from kvd.config.quota_rules import QUOTA_KEYS, RULES, over
from kvd.core.cache.namespaces import MEMBER, bad_name
from kvd.core.handoff.message_sizes import MESSAGE_BYTES
from kvd.core.layout.spec import MAX_TAG_CHARS
from kvd.core.peers.allowed import OF, allowed_by_name
from kvd.curve import KeyFlaw, is_key, read_pair
from kvd.families import FAMILIES, POOLS, Breach
from kvd.families.budget import size_bytes
from kvd.families.family import TextRule, text_rule
from kvd.families.sharding import layers_of, ranks_of
from kvd.types import amount
from kvd.wire.bounds import NAMESPACE_CHARS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvd.config.address import Address
    from kvd.config.schema import Config

__all__ = ["RULES", "entry_flaw", "flaw_of", "reason_not_built"]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SOCKET_PATH_BYTES = 107
"""Longest path of a unix socket: sun_path is 108 bytes with its final NUL."""
FRAME_OVERHEAD_BYTES = 65536
"""What a message may hold beside its tokens: the header frame, the grants of an Offer included."""

FOUR_BIT = ("float4_e2m1fn_x2", "fp4", "fp4_e2m1", "nvfp4", "mxfp4", "mxfp8", "int4", "uint4")
_PACKED = (
    "two elements to a byte, or scales among the elements, have no shape that a pool can be seen "
    "in: only family raw holds them, as bytes, and prefill-only has nowhere to write them"
)

NOT_BUILT = {
    "pool.family": {
        name: f'to have KV nowhere is a mode of the cache: set cache.mode = "{name}"'
        for name in FAMILIES
        if name not in POOLS
    },
    "pool.dtype": dict.fromkeys(FOUR_BIT, _PACKED),
    "pool.scale_dtype": dict.fromkeys(FOUR_BIT, _PACKED),
    "pool.index_dtype": dict.fromkeys(FOUR_BIT, _PACKED),
    "radix.policy": {
        "tlru": "it goes by how much one conversation may leave to be computed again, which the "
        "pool of several engines has no figure for"
    },
    "transfer.transport": {
        "loopback": "loopback moves bytes inside one process and exists for unit tests only"
    },
}
"""Values that will be or are meant for others: refused with the reason, by key."""


def reason_not_built(key: str, value: object) -> str | None:
    """Why a value that a reader of the documentation may expect is refused; None if it is not."""
    return NOT_BUILT.get(key, {}).get(value) if isinstance(value, str) else None


def flaw_of(key: str, text: str) -> str | None:
    """What to do about ``text`` if it does not follow the rule of ``key``; None if it does."""
    judge = _TEXTS.get(key)
    return judge(text) if judge is not None else None


def entry_flaw(key: str, entry: str) -> str | None:
    """What to do about the name of an entry of the table ``key``; None if it is right."""
    return _ENTRIES[key](entry)


def _socket(text: str) -> str | None:
    path = ipc_path(text)
    if path is None:
        return "write for example ipc:///run/kvd/client.sock"
    size = len(path.encode())
    return None if size <= 100 else f"shorten the path, which has {size} bytes"


def _group(text: str) -> str | None:
    return None if has_group(text) else f"create it with: groupadd --system {text}"


def _is_listener(text: str) -> bool:
    address = tcp_address(text)
    return address is not None and (address.is_ip or address.is_wildcard)


def _is_reachable(text: str) -> bool:
    address = tcp_address(text)
    return address is not None and not address.is_wildcard and address.port != 0


def _is_loopback(text: str) -> bool:
    address = host_port(text)
    return text == "off" or (address is not None and address.is_ip and address.is_loopback)


def _is_plain_directory(text: str) -> bool:
    parts = text.split("/")[1:]
    return text.startswith("/") and text.isprintable() and all(parts) and ".." not in parts


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


def _is_allowed(text: str) -> bool:
    name, _, namespace = text.partition(OF)
    known = NAME.fullmatch(name) is not None and len(namespace) <= NAMESPACE_CHARS
    return known and bad_name(namespace, name) is None


def _is_namespace(text: str) -> bool:
    return len(text) <= NAMESPACE_CHARS and bad_name(text, "") is None


_NAME = text_rule(_matches(NAME.pattern), "choose a plain name like decode-0")
_SIZE = text_rule(lambda text: size_bytes(text) is not None, "write for example 256MiB")

_TEXTS: dict[str, TextRule] = {
    "node.name": _NAME,
    "sockets.client": _socket,
    "sockets.admin": _socket,
    "sockets.mode": text_rule(
        _matches(r"0[67][0-7]{2}"), "write 0660 to let the group in, 0600 to keep it out"
    ),
    "sockets.group": _group,
    "peers.listen": text_rule(_is_listener, "write for example tcp://127.0.0.1:7402"),
    "peers.allow": text_rule(_is_allowed, "write a plain name like decode-0, or decode-0:llama"),
    "peers.connect": text_rule(_is_reachable, "write for example tcp://10.0.0.5:7402"),
    "peers.secret_key_file": text_rule(
        lambda text: text.startswith("/") and not text.endswith("/") and text.isprintable(),
        "write for example /etc/kvd/peer.secret",
    ),
    "peers.keys": text_rule(is_key, "write the public key that kvd keygen printed on that node"),
    "pool.name": _NAME,
    "pool.tag": text_rule(
        lambda text: len(text) <= MAX_TAG_CHARS and (text.isprintable() or not text),
        "name engine, version and packing, and nothing else",
    ),
    "pool.device": text_rule(
        _matches(r"cpu|cuda:(0|[1-9][0-9]{0,2})"), "write cpu, or for example cuda:0"
    ),
    "pool.size": _SIZE,
    "pool.saved_size": _SIZE,
    "pool.tp_ranks": text_rule(
        lambda text: ranks_of(text) is not None, "write for example 0-3, the last one included"
    ),
    "pool.stage": text_rule(
        lambda text: layers_of(text) is not None, "write for example 0:16, the last not included"
    ),
    "pool.directory": text_rule(_is_plain_directory, "write for example /dev/shm/kvd"),
    "transfer.ucx": text_rule(str.isprintable, "remove what cannot be printed"),
    "http.listen": text_rule(
        _is_loopback,
        "write 127.0.0.1:7480; to be scraped from elsewhere put a proxy in front of it",
    ),
    "kv_events.model": text_rule(
        lambda text: 0 < len(text) <= NAMESPACE_CHARS and text.isprintable() and "@" not in text,
        "write the name that requests give to the router, for example llama-70b",
    ),
    "kv_events.namespaces": text_rule(
        lambda text: text != "" and _is_namespace(text) and MEMBER not in text,
        "name the base alone, or what it begins with, for example llama",
    ),
    "kv_events.listen": text_rule(_is_listener, "write for example tcp://127.0.0.1:7403"),
    "kv_events.replay": text_rule(_is_listener, "write for example tcp://127.0.0.1:7404"),
    "cache.epochs_directory": text_rule(lambda text: text.startswith("/"), "begin it with /"),
    "tiers.disk.directory": text_rule(
        _is_plain_directory, "write for example /var/lib/kvd/tiers/disk"
    ),
    "tiers.disk.size": _SIZE,
    "tiers.disk.max_moving": _SIZE,
    "tiers.disk.max_rate": _SIZE,
    "tiers.store.endpoint": text_rule(
        _matches(r"https?://([A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(:[0-9]{1,5})?"),
        "write for example http://127.0.0.1:8333",
    ),
    "tiers.store.bucket": text_rule(
        _matches(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"), "name the bucket, for example kvd"
    ),
    "tiers.store.prefix": text_rule(
        _matches(r"[A-Za-z0-9_.=-]+(/[A-Za-z0-9_.=-]+)*"), "write for example kv/llama-70b-r3"
    ),
    "tiers.store.region": text_rule(_matches(r"[A-Za-z0-9-]+"), "write for example us-east-1"),
    "tiers.store.credentials_file": text_rule(
        _is_plain_directory, "write for example /etc/kvd/store.credentials"
    ),
    "tiers.store.profile": text_rule(_matches(r"[A-Za-z0-9_.-]+"), "write for example kvd"),
    "tiers.store.ca_file": text_rule(
        _is_plain_directory, "write for example /etc/kvd/store-ca.pem"
    ),
    "tiers.store.max_moving": _SIZE,
    "tiers.store.max_rate": _SIZE,
    **dict.fromkeys(QUOTA_KEYS, _SIZE),
    "recorder.directory": text_rule(lambda text: text.startswith("/"), "begin it with /"),
} | {f"pool.{key}": rule for row in POOLS.values() for key, rule in row.texts.items()}

_ENTRIES: dict[str, TextRule] = {
    "peers.connect": _NAME,
    "peers.keys": _NAME,
    "transfer.ucx": text_rule(
        _matches(r"UCX_[A-Z0-9_]+"), "name a variable of UCX, like UCX_NET_DEVICES"
    ),
    **dict.fromkeys(QUOTA_KEYS, text_rule(_is_namespace, "name a namespace as engines do")),
} | {f"pool.{key}": rule for row in POOLS.values() for key, rule in row.entries.items()}


@over("peers.heartbeat_s", "peers.suspect_s", "peers.lost_s")
def _silence(config: Config) -> Iterator[Breach]:
    """Between two limits there must be time for a Ping to be heard."""
    peers = config.peers
    if peers.suspect_s < 2 * peers.heartbeat_s:
        rule = f"must be at least twice peers.heartbeat_s, which is {peers.heartbeat_s}"
        yield Breach("peers.suspect_s", rule, f"give at least {2 * peers.heartbeat_s}")
    if peers.lost_s <= peers.suspect_s:
        rule = f"must be longer than peers.suspect_s, which is {peers.suspect_s}"
        yield Breach("peers.lost_s", rule, f"give {2 * peers.suspect_s}, for example")


# ---- keys of peers: nothing leaves this host without them, and each is of one node ------------

_SECRET = "peers.secret_key_file"
_BARE = (
    "leaves this host, and peers.secret_key_file is not set: nothing would be encrypted, and "
    "anyone could speak as any node"
)
_ACCEPT = (
    "run kvd keygen and set peers.secret_key_file and peers.keys; or stay on loopback; or set "
    "peers.insecure = true if every host of that network is trusted"
)


@over("peers.listen", "peers.insecure", _SECRET)
def _leaves_host(config: Config) -> Iterator[Breach]:
    """Nothing goes to another host without keys, unless the operator said that it may."""
    peers = config.peers
    if peers.insecure or peers.secret_key_file is not None:
        return
    listen = tcp_address(peers.listen)
    if listen is not None and not listen.is_loopback:
        yield Breach("peers.listen", _BARE, _ACCEPT)
    for name, endpoint in peers.connect.items():
        address = tcp_address(endpoint)
        if address is not None and not address.is_loopback:
            yield Breach("peers.connect", _BARE, _ACCEPT, entry=name)


@over("node.name", "peers.insecure", "peers.keys", _SECRET)
def _own_key(config: Config) -> Iterator[Breach]:
    """The secret file can be used, is wanted, and is there if keys are."""
    peers = config.peers
    if peers.secret_key_file is None:
        rule = "is of no use without peers.secret_key_file, this node's own key"
        fix = "make one with kvd keygen and set peers.secret_key_file"
        for name in list(peers.keys)[:1]:
            yield Breach("peers.keys", rule, fix, entry=name)
        return
    if peers.insecure:
        rule = "contradicts peers.secret_key_file, with which every peer must prove its key"
        yield Breach("peers.insecure", rule, "remove one of the two")
    own = read_pair(peers.secret_key_file)
    if isinstance(own, KeyFlaw):
        yield Breach(_SECRET, own.rule, own.fix)
        return
    for name, key in peers.keys.items():
        if name == config.node.name and key != own.public:
            rule = "is this node, and not the public key of peers.secret_key_file"
            yield Breach("peers.keys", rule, f"write {own.public} or remove it", entry=name)
        elif name != config.node.name and key == own.public:
            fix = f"write the key that kvd keygen printed on {name}"
            yield Breach("peers.keys", "is the key of this node itself", fix, entry=name)


@over("peers.keys")
def _one_key_each(config: Config) -> Iterator[Breach]:
    """A key says which node speaks: it is of one node."""
    seen: dict[str, str] = {}
    for name, key in config.peers.keys.items():
        if key in seen:
            rule = f"is the key of {seen[key]} already, and a key is of one node"
            yield Breach("peers.keys", rule, f"run kvd keygen on {name} too", entry=name)
        seen.setdefault(key, name)


@over("peers.allow", "peers.keys", _SECRET)
def _all_have_keys(config: Config) -> Iterator[Breach]:
    """Whoever is dialed or let in by name has a key to prove it with."""
    peers = config.peers
    if peers.secret_key_file is None:
        return
    rule = "has no key in peers.keys, so it cannot be told from anyone else"
    for name in peers.connect:
        if name not in peers.keys:
            fix = f"set peers.keys.{name} to its public key"
            yield Breach("peers.connect", rule, fix, entry=name)
    for name in allowed_by_name(peers.allow):
        if name not in peers.keys:
            fix = f"set peers.keys.{name}, or remove it"
            yield Breach("peers.allow", f"names {name}, which {rule}", fix)


# ---- who is a peer, and what shares sockets, frames and ports ------------------------------------


@over("node.name", "peers.listen")
def _others(config: Config) -> Iterator[Breach]:
    """Peers are other nodes, each once."""
    seen: dict[str, str] = {}
    for name, endpoint in config.peers.connect.items():
        if name == config.node.name:
            rule = "is the name of this node, which is no peer of itself"
            fix = "remove it, or set node.name"
            yield Breach("peers.connect", rule, fix, entry=name)
        elif endpoint == config.peers.listen:
            fix = "give the address of the peer"
            yield Breach("peers.connect", "is the address of this node", fix, entry=name)
        elif endpoint in seen:
            rule = f"is the address of {seen[endpoint]} already"
            yield Breach("peers.connect", rule, "give each peer its own address", entry=name)
        seen.setdefault(endpoint, name)


@over("peers.allow")
def _allowed(config: Config) -> Iterator[Breach]:
    """Whoever is a source must be let in, and each either reads everything or what is named."""
    entries = config.peers.allow
    allowed = allowed_by_name(entries)
    for name in config.peers.connect if allowed else ():
        if name not in allowed:
            fix = f"add {name} to peers.allow"
            yield Breach("peers.connect", "is not in peers.allow", fix, entry=name)
    for name, namespaces in allowed.items():
        if namespaces and name in entries:
            rule = f"names {name} alone, which lets it pull everything, and with namespaces"
            yield Breach("peers.allow", rule, f"remove {name}, or what names a namespace of it")


@over("sockets.client", "sockets.admin")
def _sockets_apart(config: Config) -> Iterator[Breach]:
    """Three sockets, three paths, none too long."""
    client, admin = config.sockets.client, config.sockets.admin
    attach = attach_path(client)
    if ipc_path(client) == attach:
        rule = "is the path of the attach socket, which lies beside it"
        yield Breach("sockets.client", rule, "name the file client.sock")
    if len(attach.encode()) > SOCKET_PATH_BYTES:
        rule = f"puts attach.sock at a path of {len(attach.encode())} bytes, above 107"
        yield Breach("sockets.client", rule, "choose a shorter directory")
    if ipc_path(admin) in {ipc_path(client), attach}:
        rule = f"is taken: engines use {client} and {attach}"
        yield Breach("sockets.admin", rule, "name the file admin.sock")


@over("limits.max_prompt_tokens", "limits.max_frame_bytes")
def _prompt_in_frame(config: Config) -> Iterator[Breach]:
    """The tokens of a prompt travel as one frame of 4 bytes each."""
    needed = 4 * config.limits.max_prompt_tokens + FRAME_OVERHEAD_BYTES
    if needed > config.limits.max_frame_bytes:
        more = amount(FRAME_OVERHEAD_BYTES)
        rule = f"must hold limits.max_prompt_tokens at 4 B each and {more} more"
        yield Breach("limits.max_frame_bytes", rule, f"give at least {needed}")


@over("limits.max_aux_bytes", "limits.max_frame_bytes")
def _aux_in_frame(config: Config) -> Iterator[Breach]:
    """The aux travels in one message, or no handoff is begun at all."""
    needed = config.limits.max_aux_bytes + MESSAGE_BYTES
    if needed > config.limits.max_frame_bytes:
        rule = f"must hold limits.max_aux_bytes and {MESSAGE_BYTES} more"
        yield Breach("limits.max_frame_bytes", rule, f"give at least {needed}")


@over("http.listen", "peers.listen", "kv_events.listen", "kv_events.replay")
def _ports_apart(config: Config) -> Iterator[Breach]:
    """No two listeners share a port of one address."""
    taken = [("peers.listen", tcp_address(config.peers.listen))]
    others = [("http.listen", host_port(config.http.listen))]
    if config.kv_events.enabled:
        others += [
            ("kv_events.listen", tcp_address(config.kv_events.listen)),
            ("kv_events.replay", tcp_address(config.kv_events.replay)),
        ]
    for key, address in others:
        for other, place in taken:
            if address is not None and place is not None and _collide(address, place):
                rule = f"uses port {address.port} as {other} does"
                yield Breach(key, rule, "choose another port")
        taken.append((key, address))


def _collide(one: Address, other: Address) -> bool:
    is_one_host = one.host == other.host or one.is_wildcard or other.is_wildcard
    return one.port == other.port != 0 and is_one_host


# ---- KV events -----------------------------------------------------------------------------------


@over("kv_events.model", "kv_events.listen", "kv_events.replay", "cache.mode")
def _routers_hear(config: Config) -> Iterator[Breach]:
    """There is something to tell, of a model with a name, and only to whom it may be told."""
    told = config.kv_events
    if not told.enabled:
        return
    if told.model is None:
        rule = "is needed with kv_events.enabled: routers find a node's blocks by the model's name"
        yield Breach("kv_events.model", rule, 'write for example model = "llama-70b"')
    if config.cache.mode != "radix":
        rule = f"is refused with cache.mode = {config.cache.mode}, which caches nothing to tell of"
        yield Breach("kv_events.enabled", rule, "remove it")
    for key, text in (("kv_events.listen", told.listen), ("kv_events.replay", told.replay)):
        address = tcp_address(text)
        if address is not None and not address.is_loopback and not told.insecure:
            rule = "leaves this host, and routers speak no CURVE: anyone could read the token ids"
            fix = "stay on loopback, or set kv_events.insecure = true if every host of that "
            yield Breach(key, rule, f"{fix}network is trusted")
