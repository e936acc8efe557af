"""SGLang's names of pages, as keys: where the pages of a chain may lie in the tree.

A name is a hash over the tokens of its page and the name before it, so it stands for all tokens so
far, wherever it is found. A chain of names is a prompt of keys; pages of it are found from its
first page on.

The start of a chain may be missing here: a daemon was restarted, or was not there when SGLang wrote
it, and SGLang, which has these pages itself, does not write them again. What comes behind is then
a chain of its own, which begins at a later page. So one chain may lie in several **strands**.

A linker is asked about the end of a prompt, and given the pages of one node of SGLang's tree; what
is before them is not said. It is remembered from prompts that were told in full (``KnownChains``).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Matched = Callable[[Sequence[bytes]], int]
    """Of a prompt of keys, how many pages are there from the first one on."""

MOST_PAGES: Final = 2**18
"""Names of so many pages are remembered; those that were told longest ago go first."""


def key_of(name: str) -> bytes:
    """The key of a page: what the hash says, or a hash of what is none."""
    try:
        key = bytes.fromhex(name)
    except ValueError:
        key = b""
    if len(key) == 32:
        return key
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()


class PromptKeys(NamedTuple):
    """Keys of all pages of a prompt, the last of which may be begun only."""

    keys: list[bytes]
    is_shared: bool
    """Whether its tokens alone say what its KV is."""

    def of_life(self, life: str) -> list[bytes]:
        """Those that two engines use in this life of a room; of a shared prompt always the same."""
        if self.is_shared:
            return self.keys
        return [hashlib.sha256(life.encode() + b"\0" + key).digest() for key in self.keys]


def keys_of_prompt(names: Sequence[str], rest: bytes, seed: bytes) -> list[bytes]:
    """Those of whole pages, and one for a page that is begun.

    Args:
        names: SGLang's, of the whole pages.
        rest: the tokens of a page that is not whole; empty: there is none.
        seed: what SGLang's names of this prompt begin with, such as a salt.
    """
    keys = [key_of(name) for name in names]
    if not rest:
        return keys
    before = keys[-1] if keys else seed
    return [*keys, hashlib.sha256(b"begun\0" + before + rest).digest()]


class PageChain:
    """The pages of one call, and those before them: names from the start of the prompt.

    Args:
        names: of the pages that are asked about.
        before: of those before them; None or empty: there are none, or nobody says.
    """

    def __init__(self, names: Sequence[str], before: Sequence[str] | None = None) -> None:
        self.first = len(before or ())
        """Where the pages begin that are asked about."""
        self.keys = [key_of(name) for name in (*(before or ()), *names)]

    @property
    def end(self) -> int:
        """Behind the last page."""
        return len(self.keys)


class PageStrand(NamedTuple):
    """Pages ``[first, end)`` of a chain that lie behind each other, from page ``root`` on."""

    root: int
    first: int
    end: int


def strands_of(chain: PageChain, matched: Matched) -> Iterator[PageStrand]:
    """Those that hold the pages that are asked about, up to the first one that is nowhere.

    A strand that begins before them is found only if no page before it is missing, or if it
    begins with them: which page a strand begins with is known by asking alone.
    """
    root = 0
    while root < chain.end:
        n_pages = matched(chain.keys[root:])
        end = root + n_pages
        if end > chain.first:
            yield PageStrand(root, max(root, chain.first), end)
        if not n_pages and root >= chain.first:
            return
        # What is missing before the pages that are asked about is nobody's business here.
        root = end if n_pages else chain.first


class RestorablePages:
    """After how many pages a prompt can be gone on from, as each pool of SGLang allows it.

    Args:
        n_pages: that the first pool has, from the first page on.
    """

    def __init__(self, n_pages: int) -> None:
        self._n_pages = n_pages
        self._lengths = set(range(1, n_pages + 1))
        self._most: dict[str, int] = {}

    def whole(self, pool: str, n_pages: int) -> None:
        """Of this one every page must be there, and so many are."""
        self._among(pool, set(range(1, n_pages + 1)))

    def trailing(self, pool: str, is_there: Sequence[bool], n_trailing: int) -> None:
        """Of this one the last pages must be: a window, or one state."""
        lengths, run = set(), 0
        for number, there in enumerate(is_there):
            run = run + 1 if there else 0
            if run >= min(n_trailing, number + 1):
                lengths.add(number + 1)
        self._among(pool, lengths)

    def _among(self, pool: str, lengths: set[int]) -> None:
        self._most[pool] = max(lengths, default=0)
        self._lengths &= lengths

    @property
    def lengths(self) -> list[int]:
        """All of them, in order."""
        return sorted(self._lengths)

    @property
    def most(self) -> int:
        """The largest; 0: there is none."""
        return max(self._lengths, default=0)

    def by_pool(self, first: str) -> dict[str, int]:
        """How far each pool has it by itself, those that have any."""
        found = {first: self._n_pages, **self._most}
        return {pool: n_pages for pool, n_pages in found.items() if n_pages}


class KnownChains:
    """Of each page that was told, the one before it."""

    def __init__(self, most: int = MOST_PAGES) -> None:
        self._most = most
        self._before: OrderedDict[str, str] = OrderedDict()

    def tell(self, names: Sequence[str]) -> None:
        """All pages of a prompt, in order."""
        for before, name in zip(("", *names), names, strict=False):
            self._before[name] = before
            self._before.move_to_end(name)
        while len(self._before) > self._most:
            self._before.popitem(last=False)

    def before(self, name: str) -> list[str] | None:
        """The pages before it, from the first one on; None: that is not known."""
        found: list[str] = []
        while name := self._before.get(name, "?"):
            if name == "?":
                return None
            found.append(name)
        return found[::-1]
