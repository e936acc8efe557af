"""What ``kv_connector_extra_config`` says, with defaults; an unknown key is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX: Final = "kvd."
"""Keys of others, which a connector of several may be given too, are not looked at."""

SAVES: Final = ("all", "prompt", "none")
KNOWN_BY: Final = ("content", "path")
MEDIA_KNOWN_BY: Final = ("content", "uuid")


class VllmOptions(msgspec.Struct, frozen=True, rename=lambda name: PREFIX + name):
    """One field for each key ``kvd.NAME``."""

    endpoint: str = ""
    """Of the daemon's client socket; empty: where a daemon of this host listens."""
    pool: str = "main"
    namespace: str = ""
    """A partition: engines of unlike ones share nothing. What tells models apart is added."""
    weights: str = ""
    """The name of the model's weights, where files cannot tell; empty: what files tell."""
    adapters: str = "content"
    """What LoRA adapters are known by: ``content`` of their files, or ``path``, where the files of
    a path never change."""
    media: str = "content"
    """What images and sound are known by: the ``content`` that vLLM has digested alone, or by the
    ``uuid`` that a request gives them too, where each is of one content."""
    handoffs: bool = True
    """Hand prompts over to other nodes, and take them; false: cache only."""
    save: str = "all"
    """``all``: what is generated is cached too; ``prompt``: prompts alone; ``none``: nothing."""
    reserve_tokens: int = 256
    """Pages for so many generated tokens are promised with a prompt, and taken as they come."""
    keep_s: float = 120.0
    """So long a prompt that another node will decode is kept for it."""
    deadline_s: float = 30.0
    """A handoff that takes longer is given up, and its prompt computed."""
    probe_wait_s: float = 0.001
    """So long a step of the scheduler waits for an answer of the daemon, at most."""
    load_parts: bool = False
    """Fill the blocks of a prompt while it still comes from the node that computes it."""
    computes_per_s: float = 10_000.0
    """So many tokens of a prompt the engine computes in a second, as far as its user knows: what a
    tier has of a prompt is waited for no longer than that takes; 0: nothing is."""
    copy_threads: int = 1
    """So many threads of each worker copy, where its blocks are in host memory."""
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
    for key, chosen, known_values in (
        ("save", found.save, SAVES),
        ("adapters", found.adapters, KNOWN_BY),
        ("media", found.media, MEDIA_KNOWN_BY),
    ):
        if chosen not in known_values:
            raise BadOptions(f"kvd.{key} is {chosen!r}: it is one of {', '.join(known_values)}")
    return found
