"""What stands in a prompt beside its tokens: images, sound, and what else is computed from.

Tokens that stand for unlike images are equal, so a page that has any of them is found by what vLLM
calls the image, too, and by where in the page it begins. That name has to be one content's in every
engine, for as long as anything is cached. Nothing here imports vLLM.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvd.connectors.attributes import attribute

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTENT: Final = re.compile(r"(?:.*:)?(?:[0-9a-f]{64}|[0-9a-f]{128})", re.DOTALL)
"""What vLLM calls an image by itself: a digest of its content and of how it is prepared, behind the
name of an adapter where that computes on it. All else is what a user has called it."""

NO_TOKENS: Final = "no tokens that it could be found by"
NUMBERED: Final = (
    "its images or sound have numbers for names, as this engine has neither a cache of prepared "
    "media nor one of prefixes: set --mm-processor-cache-gb above 0"
)
NAMED: Final = (
    "its images or sound have names that its user has given (multi_modal_uuids), which other "
    'engines may give to others; set "kvd.media": "uuid" if each is of one content, for ever'
)
GROWS: Final = "images or sound may be added to it while it goes on (a session of streamed input)"


class Position(Protocol):
    """Which tokens stand for it."""

    offset: int
    length: int


class Feature(Protocol):
    """An image, or what else it is; and what vLLM finds its encoded form by."""

    identifier: str
    mm_position: Position


class MediaView(Protocol):
    """What is read of a request of vLLM's."""

    prompt_embeds: Any
    mm_features: Sequence[Feature]


class MediaKeys:
    """By which the pages of an engine's prompts are found beside their tokens.

    Args:
        config: of vLLM: its cache and its model are looked at.
        by_uuid: what users call images and sound is trusted.
    """

    def __init__(self, config: Any, *, by_uuid: bool) -> None:
        media = attribute(config.model_config, "multimodal_config")
        self._takes_media = media is not None
        # Then each is called by how many this process has had before, whatever it shows.
        self._numbers = (
            media is not None
            and attribute(media, "mm_processor_cache_gb") == 0
            and not config.cache_config.enable_prefix_caching
        )
        self._by_uuid = by_uuid

    def of(self, request: MediaView, page_size: int) -> dict[int, bytes] | str:
        """By page, what stands there beside tokens; or why the request cannot be found, in words.

        Args:
            request: vLLM's.
            page_size: tokens of a page.
        """
        if request.prompt_embeds is not None:
            return NO_TOKENS
        if self._takes_media and attribute(request, "resumable"):
            return GROWS
        if not request.mm_features:
            return {}
        if self._numbers:
            return NUMBERED
        found: dict[int, list[bytes]] = {}
        for feature in request.mm_features:
            name, place = feature.identifier, feature.mm_position
            if not self._by_uuid and not CONTENT.fullmatch(name):
                return NAMED
            first, end = place.offset // page_size, -(-(place.offset + place.length) // page_size)
            for page in range(first, end):
                # With its length: a name may have anything in it, the next one's too.
                told = f"{len(name)} {name} {place.offset - page * page_size} "
                found.setdefault(page, []).append(told.encode("utf-8", "surrogatepass"))
        return {page: hashlib.sha256(b"".join(told)).digest() for page, told in found.items()}
