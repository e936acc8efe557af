"""Rules about the keys of peers: nothing leaves this host without them, and each is of one node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.config.address import tcp_address
from kvd.config.finding import Finding, Rule
from kvd.curve import KeyFlaw, read_pair

if TYPE_CHECKING:
    from kvd.config.schema import Config

_BARE = (
    "leaves this host, and peers.secret_key_file is not set: nothing would be encrypted, and "
    "anyone could speak as any node"
)
_ACCEPT = (
    "run kvd keygen and set peers.secret_key_file and peers.keys; or stay on loopback; or set "
    "peers.insecure = true if every host of that network is trusted"
)


def _leaves_host(config: Config) -> list[Finding]:
    """Nothing goes to another host without keys, unless the operator said that it may."""
    peers = config.peers
    if peers.insecure or peers.secret_key_file is not None:
        return []
    out = []
    listen = tcp_address(peers.listen)
    if listen is not None and not listen.is_loopback:
        out.append(Finding("peers.listen", _BARE, _ACCEPT))
    for name, endpoint in peers.connect.items():
        address = tcp_address(endpoint)
        if address is not None and not address.is_loopback:
            out.append(Finding("peers.connect", _BARE, _ACCEPT, name))
    return out


def _own_key(config: Config) -> list[Finding]:
    """The secret file can be used, is wanted, and is there if keys are."""
    peers = config.peers
    if peers.secret_key_file is None:
        rule = "is of no use without peers.secret_key_file, this node's own key"
        fix = "make one with kvd keygen and set peers.secret_key_file"
        return [Finding("peers.keys", rule, fix, name) for name in list(peers.keys)[:1]]
    out = []
    if peers.insecure:
        rule = "contradicts peers.secret_key_file, with which every peer must prove its key"
        out.append(Finding("peers.insecure", rule, "remove one of the two"))
    own = read_pair(peers.secret_key_file)
    if isinstance(own, KeyFlaw):
        out.append(Finding("peers.secret_key_file", own.rule, own.fix))
        return out
    for name, key in peers.keys.items():
        if name == config.node.name and key != own.public:
            rule = "is this node, and not the public key of peers.secret_key_file"
            out.append(Finding("peers.keys", rule, f"write {own.public} or remove it", name))
        elif name != config.node.name and key == own.public:
            rule = "is the key of this node itself"
            fix = f"write the key that kvd keygen printed on {name}"
            out.append(Finding("peers.keys", rule, fix, name))
    return out


def _one_key_each(config: Config) -> list[Finding]:
    """A key says which node speaks: it is of one node."""
    out = []
    seen: dict[str, str] = {}
    for name, key in config.peers.keys.items():
        if key in seen:
            rule = f"is the key of {seen[key]} already, and a key is of one node"
            out.append(Finding("peers.keys", rule, f"run kvd keygen on {name} too", name))
        seen.setdefault(key, name)
    return out


def _all_have_keys(config: Config) -> list[Finding]:
    """Whoever is dialed or let in by name has a key to prove it with."""
    peers = config.peers
    if peers.secret_key_file is None:
        return []
    rule = "has no key in peers.keys, so it cannot be told from anyone else"
    out = [
        Finding("peers.connect", rule, f"set peers.keys.{name} to its public key", name)
        for name in peers.connect
        if name not in peers.keys
    ]
    out += [
        Finding(
            "peers.allow", f"names {name}, which {rule}", f"set peers.keys.{name}, or remove it"
        )
        for name in peers.allow
        if name not in peers.keys
    ]
    return out


_SECRET = "peers.secret_key_file"

KEY_RULES = (
    Rule(_leaves_host, frozenset({"peers.listen", "peers.insecure", _SECRET})),
    Rule(_own_key, frozenset({"node.name", "peers.insecure", "peers.keys", _SECRET})),
    Rule(_one_key_each, frozenset({"peers.keys"})),
    Rule(_all_have_keys, frozenset({"peers.allow", "peers.keys", _SECRET})),
)
