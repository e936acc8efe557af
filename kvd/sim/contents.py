"""What pages hold: not bytes, but which tokens of which sequence they are the KV of.

The KV of a page depends on every token before it, so the content of a page is named by the content
of the page before and the tokens on it. Equal names mean equal KV; nothing is hashed away.
"""

from __future__ import annotations

from kvd.core.cache.namespaces import key_of
from kvd.types import ID_BYTES, Tokens, count

UNWRITTEN = 0
TORN = -1
"""A page of which some bytes have been overwritten, and others not yet."""

PAGE_TOKENS = 16
_PAGE_BYTES = PAGE_TOKENS * ID_BYTES


class Contents:
    """A number for every content that occurs in one simulation."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int | str, bytes], int] = {}

    def after(self, before: int | str, piece: bytes) -> int:
        """The content of the page with the tokens ``piece`` that follows ``before``.

        ``before`` is the content of the page before it, or the namespace for a first page.
        """
        key = (before, piece)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers) + 1
        return number

    def piece(self, content: int, number: int) -> int:
        """What that piece of a page with this content is, in a component that has smaller pages."""
        return self.after(content, bytes([number]))

    def of(self, tokens: Tokens, namespace: str) -> list[int]:
        """The contents of the pages of a sequence, a last partial page included."""
        contents: list[int] = []
        before: int | str = namespace
        for start in range(0, len(tokens), _PAGE_BYTES):
            before = self.after(before, tokens[start : start + _PAGE_BYTES])
            contents.append(before)
        return contents


class WrittenPrompt:
    """A sequence, and what its pages hold when so much of it is written."""

    __slots__ = ("_contents", "epoch", "key", "n_tokens", "namespace", "pages", "tokens")

    def __init__(self, contents: Contents, tokens: Tokens, namespace: str, epoch: int = 0) -> None:
        self.tokens = tokens
        self.namespace = namespace
        self.epoch = epoch
        """Of the weights that it is computed with: in another one its KV is another."""
        self.key = key_of(namespace, epoch)
        self.n_tokens = count(tokens)
        self.pages = contents.of(tokens, self.key)
        """Contents of all its pages, a last partial one included."""
        self._contents = contents

    def upto(self, n_tokens: int) -> list[int]:
        """Contents when the first ``n_tokens`` are written."""
        if n_tokens == self.n_tokens:
            return self.pages
        whole, rest = divmod(n_tokens, PAGE_TOKENS)
        pages = self.pages[:whole]
        if rest:
            start = whole * _PAGE_BYTES
            piece = self.tokens[start : start + rest * ID_BYTES]
            pages.append(self._contents.after(pages[-1] if pages else self.key, piece))
        return pages

    def followed_by(self, tokens: Tokens) -> WrittenPrompt:
        """The sequence with more tokens at its end."""
        return self._of(Tokens(self.tokens + tokens), self.epoch)

    def beginning(self, n_tokens: int) -> WrittenPrompt:
        """The first ``n_tokens`` of the sequence alone."""
        return self._of(Tokens(self.tokens[: n_tokens * ID_BYTES]), self.epoch)

    def computed_in(self, epoch: int) -> WrittenPrompt:
        """The sequence as the weights of that epoch compute it."""
        return self if epoch == self.epoch else self._of(self.tokens, epoch)

    def _of(self, tokens: Tokens, epoch: int) -> WrittenPrompt:
        return WrittenPrompt(self._contents, tokens, self.namespace, epoch)
