"""What ``kv_connector_extra_config`` says, with defaults; an unknown key is refused by name."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX: Final = "kvd."
"""Keys of others, which a connector of several may be given too, are not looked at."""

MAX_NAMESPACE: Final = 200
"""Characters; a longer name is cut, and has its hash behind it."""


class VllmOptions(msgspec.Struct, frozen=True, rename=lambda name: PREFIX + name):
    """One field for each key ``kvd.NAME``."""

    endpoint: str = ""
    """Of the daemon's client socket; empty: where a daemon of this host listens."""
    pool: str = "main"
    namespace: str = ""
    """What isolates equal tokens; empty: the name and the revision of the model."""
    save: str = "all"
    """``all``: what is generated is cached too; ``prompt``: prompts alone; ``none``: nothing."""
    reserve_tokens: int = 256
    """Pages for so many generated tokens are taken with a prompt, and again when they are full."""
    keep_s: float = 120.0
    """So long a prompt that another node will decode is kept for it."""
    deadline_s: float = 30.0
    """A handoff that takes longer is given up, and its prompt computed."""
    probe_wait_s: float = 0.001
    """So long a step of the scheduler waits for an answer of the daemon, at most."""
    any_version: bool = False
    """Try a version of vLLM that this connector was not tested with."""


class BadOptions(ValueError):
    """An option that is none, or has a value that it cannot have."""


def options_of(extra: Mapping[str, object]) -> VllmOptions:
    """The options among ``extra``.

    Raises:
        BadOptions: with the key, and those that there are.
    """
    mine = {key: value for key, value in extra.items() if key.startswith(PREFIX)}
    known = [field.encode_name for field in msgspec.structs.fields(VllmOptions)]
    for key in mine:
        if key not in known:
            raise BadOptions(f"kv_connector_extra_config has {key}; there is {', '.join(known)}")
    try:
        found = msgspec.convert(mine, VllmOptions)
    except msgspec.ValidationError as error:
        raise BadOptions(f"kv_connector_extra_config: {error}") from None
    if found.save not in {"all", "prompt", "none"}:
        raise BadOptions(f'kvd.save is {found.save!r}: it is "all", "prompt" or "none"')
    return found


def namespace_of(base: str, lora: str | None, salt: str | None) -> str:
    """Requests that share KV have one namespace: of model, LoRA adapter and cache salt."""
    parts = [base]
    if lora:
        parts.append(f"lora={lora}")
    if salt:
        # A secret of its user, maybe: tables show namespaces.
        parts.append(f"salt={hashlib.sha256(salt.encode()).hexdigest()[:24]}")
    name = " ".join(parts)
    if len(name) <= MAX_NAMESPACE:
        return name
    return f"{name[:MAX_NAMESPACE]} {hashlib.sha256(name.encode()).hexdigest()[:24]}"
