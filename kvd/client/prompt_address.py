"""What the pages of a prompt are found by, as a call says it: tokens, page keys, extra keys.

What lives here: one frame for the wire out of what an engine has, and how far a lease has come, so
that what is generated after its prompt is addressed as the prompt was. What must not: how a page's
words are made (``wire.page_address``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

from kvd.client.tokens import token_frame
from kvd.errors import Code, KvdError, Refusal
from kvd.types import Tokens, count
from kvd.wire import page_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.client.prompt import Prompt
    from kvd.client.tokens import TokenIds
    from kvd.wire.page_address import ExtraKeys


class PromptAddress:
    """How far a prompt has come, and by what its pages are found.

    Attributes:
        frame: what was said of it at first.
        n_tokens: how long it is now; of pages with keys, ``page_tokens`` each.
        handle: what names it to the daemon, where something does.
    """

    def __init__(
        self,
        page_tokens: int,
        tokens: TokenIds | None,
        keys: Sequence[bytes] | None = None,
        extra_keys: ExtraKeys | None = None,
    ) -> None:
        self._page_tokens = page_tokens
        self._has_keys = keys is not None
        # A copy: an engine may fill one mapping anew for each prompt, and what this one is found by
        # later must not change with it.
        self._extra = extra_keys
        if extra_keys is not None and isinstance(extra_keys, Mapping):
            self._extra = dict(extra_keys)
        self.n_tokens = 0
        self.handle: Prompt | None = None
        self._is_begun = False
        if keys is None and tokens is None:
            raise _bad("neither tokens nor keys: one of them says which prompt it is")
        self.frame = self.following(tokens, keys)
        self.took(self.frame)
        self._is_begun = True

    def following(
        self, tokens: TokenIds | None = None, keys: Sequence[bytes] | None = None
    ) -> Tokens:
        """The frame of what comes after what is known.

        Raises:
            KvdError: ``bad-keys``, ``bad-tokens``.
        """
        if keys is not None and tokens is not None and len(tokens):
            raise _bad("both tokens and keys: a prompt has one or the other")
        if keys is None:
            frame = token_frame(() if tokens is None else tokens)
            if not frame:
                return frame
            if self._has_keys:
                raise _bad("tokens after page keys: go on with keys")
            extra = self._extra_of(count(frame))
            if not _says_something(extra):
                return frame
            return _sound(page_address.with_extra(frame, extra, self._page_tokens, self.n_tokens))
        if not self._has_keys and self.n_tokens:
            raise _bad("page keys after tokens: go on with tokens")
        if _says_something(self._extra):
            raise _bad("extra keys beside page keys: put what they say into the keys")
        return _sound(page_address.of_keys(keys, self._page_tokens))

    def copy(self) -> PromptAddress:
        """One that goes on by itself from where this one is."""
        other = PromptAddress.__new__(PromptAddress)
        other.__dict__.update(self.__dict__)
        return other

    def took(self, frame: Tokens) -> None:
        """The daemon knows these too."""
        self.n_tokens += count(frame)

    def cut(self, n_tokens: int) -> None:
        """The daemon knows no more than these, which are whole pages."""
        self.n_tokens = n_tokens

    def _extra_of(self, n_more: int) -> ExtraKeys | None:
        """What of it is about the tokens that follow."""
        if not self._is_begun or not isinstance(self._extra, Mapping):
            # Of the first ones all of it: a key for a page that is not there is a mistake.
            return self._extra
        first = self.n_tokens // self._page_tokens
        end = self.n_tokens + n_more
        return {
            page: key
            for page, key in self._extra.items()
            if first <= page and page * self._page_tokens < end
        }


def _says_something(extra: ExtraKeys | None) -> TypeGuard[ExtraKeys]:
    """Whether pages are not their tokens alone; also of what is no key, such as a salt of 0."""
    is_empty = not extra
    return extra is not None and not (is_empty and isinstance(extra, bytes | Mapping))


def _sound(frame: Tokens | Refusal) -> Tokens:
    if isinstance(frame, Refusal):
        raise KvdError(frame)
    return frame


def _bad(message: str) -> KvdError:
    return KvdError(Refusal(Code.BAD_KEYS, message, side="client"))
