"""What a page is found by: its tokens, a key of the engine's, or its tokens and an extra key.

The tree compares ``page_size`` int32 a page and asks not what they mean. Three sorts of pages say
in their first two words which they are, so no page of one sort is ever taken for one of another:

    tokens      every word is a token id, 0 or above
    key         word 0 is minus the bytes of the key, the key follows, zeros fill the page
    key, long   word 0 is -1, and a digest of the key follows: where the page is shorter than it
    extra key   every word is a token id XOR a word of the extra key's pad; from word 1 on with the
                sign bit set

XOR, and not a digest of the page: one token of a page can be told before the next is known, so a
page that a prompt leaves half full is completed by what is generated. Under one extra key it maps
different tokens to different words. Under two it would take a page of token ids that differ by both
pads in every word, and of 31 bits a vocabulary has 18: eight tokens a page are asked for.

What must not live here: which calls take them (``client``), and the tree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from kvd.errors import Code, Number, Refusal
from kvd.types import ID_BYTES, NO_TOKENS, Tokens, count

if TYPE_CHECKING:
    from numpy.typing import NDArray

MIN_KEY_BYTES: Final = 16
"""Shorter ones could be met by chance, and a page that is found is believed."""

MAX_KEY_BYTES: Final = 64
MAX_EXTRA_BYTES: Final = 4096

MIN_PAGE_TOKENS: Final = 8
"""A digest of 28 bytes fits, and an extra key changes 248 bits."""

_DIGESTED: Final = -1
_ID_BITS: Final = 0x7FFFFFFF
_SHOWN_BYTES: Final = 8

ExtraKeys = bytes | Mapping[int, bytes]
"""One for every page, or by number of the page, counted from the start of the prompt."""


def of_keys(keys: Sequence[bytes], page_tokens: int) -> Tokens | Refusal:
    """The words of pages with these keys: ``page_tokens`` int32 each.

    Args:
        keys: one a page, from the start of the prompt, all of the same size.
        page_tokens: of a page of this pool.
    """
    if not keys:
        return NO_TOKENS
    flaw = _too_small(page_tokens) or _bad_keys(keys)
    if flaw is not None:
        return flaw
    size, room = len(keys[0]), (page_tokens - 1) * ID_BYTES
    words = np.zeros((len(keys), page_tokens), dtype="<i4")
    if size <= room:
        words[:, 0] = -size
        written = keys
    else:
        words[:, 0] = _DIGESTED
        most = min(room, hashlib.blake2b.MAX_DIGEST_SIZE)
        written = [hashlib.blake2b(key, digest_size=most).digest() for key in keys]
        size = most
    rows = words.view(np.uint8)
    rows[:, ID_BYTES : ID_BYTES + size] = np.frombuffer(b"".join(written), np.uint8).reshape(
        len(keys), size
    )
    return Tokens(words.tobytes())


def with_extra(
    tokens: Tokens, extra: ExtraKeys, page_tokens: int, first_token: int = 0
) -> Tokens | Refusal:
    """The words of pages with these tokens and extra keys; pages without one are their tokens.

    Args:
        tokens: token ids, of which the first is number ``first_token`` of the prompt.
        extra: of pages; a page that is not named has none.
        page_tokens: of a page of this pool.
        first_token: what was said before is as it is.
    """
    flaw = _too_small(page_tokens) or _bad_extra(extra, first_token + count(tokens), page_tokens)
    if flaw is not None:
        return flaw
    words = np.frombuffer(tokens, dtype="<i4").copy()
    if isinstance(extra, bytes):
        pad = np.roll(_pad(extra, page_tokens), -(first_token % page_tokens))
        words ^= np.resize(pad, words.size)
        return Tokens(words.tobytes())
    pads = {key: _pad(key, page_tokens) for key in set(extra.values())}
    for page, key in extra.items():
        begin = page * page_tokens - first_token  # within ``words``; below 0 if said before
        part = words[max(begin, 0) : max(begin + page_tokens, 0)]
        skipped = max(-begin, 0)
        part ^= pads[key][skipped : skipped + part.size]
    return Tokens(words.tobytes())


def in_words(page: bytes) -> str:
    """What an operator reads of a page, or of the first words of one."""
    words = np.frombuffer(page, dtype="<i4")
    first = int(words[0]) if words.size else 0
    if first < 0:
        size = min(-first if first < _DIGESTED else _SHOWN_BYTES, _SHOWN_BYTES)
        return f"{'key' if first < _DIGESTED else 'digest'} {page[ID_BYTES:][:size].hex()}"
    if words.size > 1 and int(words[1]) < 0:
        return "tokens with an extra key"
    return " ".join(map(str, words.tolist()))


def _pad(extra: bytes, page_tokens: int) -> NDArray[np.int32]:
    said = hashlib.shake_256(extra).digest(page_tokens * ID_BYTES)
    pad = np.frombuffer(said, dtype="<i4") & np.int32(_ID_BITS)
    # Word 0 of a page with a key has the sign bit, word 1 of a page of tokens has not.
    pad[1:] |= np.int32(-(2**31))
    return pad


def _too_small(page_tokens: int) -> Refusal | None:
    if page_tokens >= MIN_PAGE_TOKENS:
        return None
    return _bad(
        f"a page of {page_tokens} tokens is too short to be found by a key: {MIN_PAGE_TOKENS} at "
        "least, see pool.page_size",
        page_tokens=page_tokens,
        needed_tokens=MIN_PAGE_TOKENS,
    )


_IN_BYTES: Final = "give bytes, for a text those of text.encode()"


def _kind(value: object) -> str:
    return type(value).__name__


def _bad_keys(keys: Sequence[object]) -> Refusal | None:
    if isinstance(keys, bytes | str):
        return _bad(f"keys are a sequence of bytes, one for each page, and no {_kind(keys)}")
    for position, key in enumerate(keys):
        if not isinstance(key, bytes):
            why = f"key {position} is a {_kind(key)}: {_IN_BYTES}"
            return _bad(why, position=position, bytes=0)
    sizes = [len(key) for key in keys if isinstance(key, bytes)]
    for position, size in enumerate(sizes):
        if not MIN_KEY_BYTES <= size <= MAX_KEY_BYTES:
            return _bad(
                f"key {position} has {size} bytes: {MIN_KEY_BYTES} to {MAX_KEY_BYTES} are taken",
                position=position,
                bytes=size,
            )
        if size != sizes[0]:
            return _bad(
                f"key {position} has {size} bytes and key 0 has {sizes[0]}: one call takes keys of "
                "one size",
                position=position,
                bytes=size,
            )
    return None


def _bad_extra(extra: object, end: int, page_tokens: int) -> Refusal | None:
    each = {0: extra} if isinstance(extra, bytes) else extra
    if not isinstance(each, Mapping):
        return _bad(
            "extra_keys are bytes for every page, or a mapping from a page's number to bytes"
        )
    n_pages = max(1, -(-end // page_tokens))
    for page, key in each.items():
        if not isinstance(key, bytes):
            why = f"the extra key of page {page} is a {_kind(key)}: {_IN_BYTES}"
            return _bad(why, page=str(page), bytes=0)
        size = len(key)
        if not 1 <= size <= MAX_EXTRA_BYTES:
            return _bad(
                f"the extra key of page {page} has {size} bytes: 1 to {MAX_EXTRA_BYTES} are taken",
                page=str(page),
                bytes=size,
            )
        if isinstance(page, bool) or not isinstance(page, int) or not 0 <= page < n_pages:
            return _bad(
                f"there is an extra key for page {page!r}, and {end} tokens have the pages 0 to "
                f"{n_pages - 1}",
                page=str(page),
                pages=n_pages,
            )
    return None


def _bad(message: str, **numbers: Number) -> Refusal:
    return Refusal(Code.BAD_KEYS, message, side="client", numbers=numbers)
