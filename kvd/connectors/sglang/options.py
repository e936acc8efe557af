"""What a user may set, in the extra configuration of a storage or linker, and what is refused."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import msgspec

from kvd.connectors.vllm.weights import process_began_ns

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger("kvd.connectors.sglang")

TESTED: Final = ("0.5.23",)
"""Versions whose classes were run, as the how-to says."""

SGLANGS: Final = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
"""Keys that are not for us; it takes its others out before."""

HANDOFF_VARIABLE: Final = "KVD_SGLANG"
"""SGLang has no flag for what a backend of transfers is told."""

NEEDS_V1: Final = (
    'kvd: "interface_v1": 1 is missing in --hicache-storage-backend-extra-config: without it '
    "SGLang copies each page once more, and says neither where it lies nor what is before it"
)


class StorageOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """By the names of keys, which begin with ``kvd.`` there."""

    endpoint: str = ""
    """``ipc:///...``; empty: the daemon of this node."""
    pool: str = "main"
    name: str = ""
    """What tables call this engine; empty: the model's name and the rank."""
    partition: str = ""
    """Engines with unlike ones share nothing."""
    weights: str = ""
    """A name for the weights, in place of what their files tell."""
    copy_threads: int = 1
    any_version: bool = False
    """Try an SGLang that was not run."""
    since_ns: int = msgspec.field(default_factory=process_began_ns)
    """When this process began; its weights were read behind that. Not for users."""


def storage_options(extra: Mapping[str, object] | None) -> StorageOptions:
    """What ``--hicache-storage-backend-extra-config`` says to us.

    Raises:
        ValueError: it has a key that nobody knows, or lacks one that SGLang needs.
    """
    given = dict(extra or {})
    if not given.get("interface_v1"):
        raise ValueError(NEEDS_V1)
    return _options({key: value for key, value in given.items() if key not in SGLANGS})


def linker_options(extra: Mapping[str, object] | None) -> StorageOptions:
    """What ``linker_extra_config`` says to us.

    Raises:
        ValueError: it has a key that nobody knows.
    """
    return _options(extra or {})


def handoff_options(environment: Mapping[str, str]) -> StorageOptions:
    """What the variable ``KVD_SGLANG`` says to us: JSON, with the keys of a linker.

    Raises:
        ValueError: it is no such thing, or has a key that nobody knows.
    """
    text = environment.get(HANDOFF_VARIABLE, "")
    try:
        return _options(msgspec.json.decode(text, type=dict[str, object]) if text else {})
    except msgspec.DecodeError as error:
        raise ValueError(f"kvd: {HANDOFF_VARIABLE} is no JSON object: {error}") from None


def _options(given: Mapping[str, object]) -> StorageOptions:
    ours = {key.removeprefix("kvd."): value for key, value in given.items()}
    known = [field for field in StorageOptions.__struct_fields__ if field != "since_ns"]
    unknown = sorted(set(ours) - set(known))
    if unknown:
        there, wrong = (", ".join(f"kvd.{name}" for name in names) for names in (known, unknown))
        raise ValueError(f"kvd: there is no {wrong} in the extra configuration; there is {there}")
    try:
        return msgspec.convert(ours, StorageOptions)
    except msgspec.ValidationError as error:
        raise ValueError(f"kvd: in the extra configuration: {error}") from None


def check_version(version: str, *, any_version: bool) -> None:
    """Whether this SGLang may be used.

    Raises:
        ValueError: it was not run, and its user has not said to try it.
    """
    if version in TESTED:
        return
    why = f"kvd: SGLang {version}: this was tested with {', '.join(TESTED)}"
    if not any_version:
        raise ValueError(f'{why}; set "kvd.any_version": true in the extra configuration to try it')
    logger.warning("%s; it is tried, since kvd.any_version says so", why)
