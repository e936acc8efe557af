"""What a value must be beyond its type, and what values must be to each other.

``flaw_of`` judges one text by its key. ``RULES`` judge a whole configuration; each names the keys
it reads, so that ``load`` can skip it when one of them is wrong already and every other finding
still comes out in the same run.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvd.config.address import attach_path, host_port, ipc_path, tcp_address
from kvd.config.family_rules import FAMILY_RULES
from kvd.config.finding import Finding, Rule
from kvd.config.host import has_group
from kvd.config.kept_rules import KEPT_RULES
from kvd.config.key_rules import KEY_RULES
from kvd.config.pool import state_tensor
from kvd.config.pool_pages import size_bytes
from kvd.config.prefill_only_rules import PREFILL_ONLY_RULES
from kvd.config.shard_rules import SHARD_RULES
from kvd.config.sharding import layers_of, ranks_of
from kvd.core.handoff.message_sizes import MESSAGE_BYTES
from kvd.curve import is_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.config.schema import Config

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SOCKET_PATH_BYTES = 107
"""Longest path of a unix socket: sun_path is 108 bytes with its final NUL."""
FRAME_OVERHEAD_BYTES = 65536
"""What a message may hold beside its tokens: the header frame, the grants of an Offer included."""

FOUR_BIT = ("float4_e2m1fn_x2", "fp4", "fp4_e2m1", "nvfp4", "mxfp4", "mxfp8", "int4", "uint4")
_PACKED = (
    "two elements to a byte, or scales among the elements, have no shape that a pool can be seen "
    "in: no family holds them, and prefill-only has nowhere to write them"
)

NOT_BUILT = {
    "pool.family": {
        "prefill-only": 'to have KV nowhere is a mode of the cache: set cache.mode = "prefill-only"'
    },
    "pool.dtype": dict.fromkeys(FOUR_BIT, _PACKED),
    "pool.scale_dtype": dict.fromkeys(FOUR_BIT, _PACKED),
    "pool.index_dtype": dict.fromkeys(FOUR_BIT, _PACKED),
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


def _name(text: str) -> str | None:
    return None if NAME.fullmatch(text) else "choose a plain name like decode-0"


def _socket(text: str) -> str | None:
    path = ipc_path(text)
    if path is None:
        return "write for example ipc:///run/kvd/client.sock"
    size = len(path.encode())
    return None if size <= 100 else f"shorten the path, which has {size} bytes"


def _mode(text: str) -> str | None:
    is_usable = re.fullmatch(r"0[67][0-7]{2}", text) is not None
    return None if is_usable else "write 0660 to let the group in, 0600 to keep it out"


def _group(text: str) -> str | None:
    return None if has_group(text) else f"create it with: groupadd --system {text}"


def _listen(text: str) -> str | None:
    address = tcp_address(text)
    if address is not None and (address.is_ip or address.is_wildcard):
        return None
    return "write for example tcp://127.0.0.1:7402"


def _reachable(text: str) -> str | None:
    address = tcp_address(text)
    if address is None or address.is_wildcard or address.port == 0:
        return "write for example tcp://10.0.0.5:7402"
    return None


def _absolute(text: str) -> str | None:
    is_path = text.startswith("/") and not text.endswith("/") and text.isprintable()
    return None if is_path else "write for example /etc/kvd/peer.secret"


def _key(text: str) -> str | None:
    return None if is_key(text) else "write the public key that kvd keygen printed on that node"


def _http(text: str) -> str | None:
    address = host_port(text)
    if text == "off" or (address is not None and address.is_ip and address.is_loopback):
        return None
    return "write 127.0.0.1:7480; to be scraped from elsewhere put a proxy in front of it"


def _variable(text: str) -> str | None:
    return None if text.isprintable() else "remove what cannot be printed"


def _directory(text: str) -> str | None:
    return None if text.startswith("/") else "begin it with /"


def _absolute_directory(text: str) -> str | None:
    parts = text.split("/")[1:]
    is_plain = text.startswith("/") and text.isprintable() and all(parts) and ".." not in parts
    return None if is_plain else "write for example /dev/shm/kvd"


def _device(text: str) -> str | None:
    is_one = re.fullmatch(r"cpu|cuda:(0|[1-9][0-9]{0,2})", text) is not None
    return None if is_one else "write cpu, or for example cuda:0"


def _size(text: str) -> str | None:
    return None if size_bytes(text) is not None else "write for example 256MiB"


def _ranks(text: str) -> str | None:
    return None if ranks_of(text) is not None else "write for example 0-3, the last one included"


def _stage(text: str) -> str | None:
    return None if layers_of(text) is not None else "write for example 0:16, the last not included"


def _state(text: str) -> str | None:
    return None if state_tensor("", text) is not None else "write for example float32[64,64,128]"


_TEXTS: dict[str, Callable[[str], str | None]] = {
    "node.name": _name,
    "sockets.client": _socket,
    "sockets.admin": _socket,
    "sockets.mode": _mode,
    "sockets.group": _group,
    "peers.listen": _listen,
    "peers.allow": _name,
    "peers.connect": _reachable,
    "peers.secret_key_file": _absolute,
    "peers.keys": _key,
    "pool.name": _name,
    "pool.device": _device,
    "pool.size": _size,
    "pool.saved_size": _size,
    "pool.state": _state,
    "pool.tp_ranks": _ranks,
    "pool.stage": _stage,
    "transfer.ucx": _variable,
    "http.listen": _http,
    "pool.directory": _absolute_directory,
    "recorder.directory": _directory,
}


def entry_flaw(key: str, entry: str) -> str | None:
    """What to do about the name of an entry of the table ``key``; None if it is right."""
    if key in {"peers.connect", "peers.keys"}:
        return _name(entry)
    if key == "pool.state":
        is_tensor = re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,31}", entry) is not None
        return None if is_tensor else "name a tensor, like ssm"
    is_variable = re.fullmatch(r"UCX_[A-Z0-9_]+", entry) is not None
    return None if is_variable else "name a variable of UCX, like UCX_NET_DEVICES"


def _silence(config: Config) -> list[Finding]:
    """Between two limits there must be time for a Ping to be heard."""
    peers = config.peers
    out = []
    if peers.suspect_s < 2 * peers.heartbeat_s:
        rule = f"must be at least twice peers.heartbeat_s, which is {peers.heartbeat_s}"
        out.append(Finding("peers.suspect_s", rule, f"give at least {2 * peers.heartbeat_s}"))
    if peers.lost_s <= peers.suspect_s:
        rule = f"must be longer than peers.suspect_s, which is {peers.suspect_s}"
        out.append(Finding("peers.lost_s", rule, f"give {2 * peers.suspect_s}, for example"))
    return out


def _others(config: Config) -> list[Finding]:
    """Peers are other nodes, each once."""
    out = []
    own = config.peers.listen
    seen: dict[str, str] = {}
    for name, endpoint in config.peers.connect.items():
        if name == config.node.name:
            rule = "is the name of this node, which is no peer of itself"
            out.append(Finding("peers.connect", rule, "remove it, or set node.name", name))
        elif endpoint == own:
            rule = "is the address of this node"
            out.append(Finding("peers.connect", rule, "give the address of the peer", name))
        elif endpoint in seen:
            rule = f"is the address of {seen[endpoint]} already"
            out.append(Finding("peers.connect", rule, "give each peer its own address", name))
        seen.setdefault(endpoint, name)
    return out


def _allowed(config: Config) -> list[Finding]:
    """Whoever is a source must be let in."""
    allow = config.peers.allow
    if not allow:
        return []
    return [
        Finding("peers.connect", "is not in peers.allow", f"add {name} to peers.allow", name)
        for name in config.peers.connect
        if name not in allow
    ]


def _sockets_apart(config: Config) -> list[Finding]:
    """Three sockets, three paths, none too long."""
    client, admin = config.sockets.client, config.sockets.admin
    attach = attach_path(client)
    out = []
    if ipc_path(client) == attach:
        rule = "is the path of the attach socket, which lies beside it"
        out.append(Finding("sockets.client", rule, "name the file client.sock"))
    if len(attach.encode()) > SOCKET_PATH_BYTES:
        rule = f"puts attach.sock at a path of {len(attach.encode())} bytes, above 107"
        out.append(Finding("sockets.client", rule, "choose a shorter directory"))
    if ipc_path(admin) in {ipc_path(client), attach}:
        rule = f"is taken: engines use {client} and {attach}"
        out.append(Finding("sockets.admin", rule, "name the file admin.sock"))
    return out


def _prompt_in_frame(config: Config) -> list[Finding]:
    """The tokens of a prompt travel as one frame of 4 bytes each."""
    needed = 4 * config.limits.max_prompt_tokens + FRAME_OVERHEAD_BYTES
    if needed <= config.limits.max_frame_bytes:
        return []
    rule = f"must hold limits.max_prompt_tokens at 4 bytes each and {FRAME_OVERHEAD_BYTES} more"
    return [Finding("limits.max_frame_bytes", rule, f"give at least {needed}")]


def _aux_in_frame(config: Config) -> list[Finding]:
    """The aux travels in one message, or no handoff is begun at all."""
    needed = config.limits.max_aux_bytes + MESSAGE_BYTES
    if needed <= config.limits.max_frame_bytes:
        return []
    rule = f"must hold limits.max_aux_bytes and {MESSAGE_BYTES} more"
    return [Finding("limits.max_frame_bytes", rule, f"give at least {needed}")]


def _ports_apart(config: Config) -> list[Finding]:
    """Two listeners cannot share a port of one address."""
    http, peers = host_port(config.http.listen), tcp_address(config.peers.listen)
    if http is None or peers is None or http.port == 0 or http.port != peers.port:
        return []
    if http.host != peers.host and not peers.is_wildcard:
        return []
    rule = f"uses port {http.port} as peers.listen does"
    return [Finding("http.listen", rule, "choose another port")]


RULES = (
    *FAMILY_RULES,
    *SHARD_RULES,
    *PREFILL_ONLY_RULES,
    *KEPT_RULES,
    Rule(_silence, frozenset({"peers.heartbeat_s", "peers.suspect_s", "peers.lost_s"})),
    *KEY_RULES,
    Rule(_others, frozenset({"node.name", "peers.listen"})),
    Rule(_allowed, frozenset({"peers.allow"})),
    Rule(_sockets_apart, frozenset({"sockets.client", "sockets.admin"})),
    Rule(_prompt_in_frame, frozenset({"limits.max_prompt_tokens", "limits.max_frame_bytes"})),
    Rule(_aux_in_frame, frozenset({"limits.max_aux_bytes", "limits.max_frame_bytes"})),
    Rule(_ports_apart, frozenset({"http.listen", "peers.listen"})),
)
"""Every rule over several keys. Invalid entries of tables are left out before they are judged."""
