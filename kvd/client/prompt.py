"""What the pages of a prompt are found by, and how a call names one that the daemon keeps.

A call says tokens, page keys or extra keys: one frame for the wire (``PromptAddress``), which knows
how far a lease has come, so that what is generated after its prompt is addressed as the prompt was.

A scheduler asks about one prompt many times. With a ``Prompt`` in the place of its tokens, each
call sends what the daemon has not seen of it yet, which is most often nothing.

What must not live here: how a page's words are made (``wire.page_address``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from msgspec.structs import replace

from kvd.client.connection import KnownPrompt
from kvd.client.port import ANSWER_WITHIN_S, foreign
from kvd.client.tokens import token_frame
from kvd.errors import Code, KvdError, Refusal
from kvd.types import ID_BYTES, NO_TOKENS, Tokens, count
from kvd.wire import client as wire
from kvd.wire import page_address

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from kvd.client.connection import Call
    from kvd.client.pool import Pools
    from kvd.client.port import Port
    from kvd.client.state import Record
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
        self.n_tokens = 0
        self.handle: Prompt | None = None
        self._is_begun = False
        self._extra: ExtraKeys | None = None
        self._has_keys = keys is not None
        if keys is None and extra_keys is None and tokens is not None:
            self.frame = token_frame(tokens)  # as nearly all are
            self.n_tokens = len(self.frame) // ID_BYTES
            self._is_begun = True
            return
        # A copy: an engine may fill one mapping anew for each prompt, and what this one is found by
        # later must not change with it.
        self._extra = extra_keys
        if extra_keys is not None and isinstance(extra_keys, Mapping):
            self._extra = dict(extra_keys)
        if keys is None and tokens is None:
            raise _bad("neither tokens nor keys: one of them says which prompt it is")
        self.frame = self.following(tokens, keys)
        self.n_tokens = count(self.frame)
        self._is_begun = True

    def following(
        self, tokens: TokenIds | None = None, keys: Sequence[bytes] | None = None
    ) -> Tokens:
        """The frame of what comes after what is known.

        Raises:
            KvdError: ``bad-keys``, ``bad-tokens``.
        """
        if keys is None:
            frame = NO_TOKENS if tokens is None else token_frame(tokens)
            is_plain = self._extra is None and not self._has_keys
            return frame if is_plain or not frame else self._with_extra(frame)
        if tokens is not None and len(tokens):
            raise _bad("both tokens and keys: a prompt has one or the other")
        if not self._has_keys and self.n_tokens:
            raise _bad("page keys after tokens: go on with tokens")
        if _says_something(self._extra):
            raise _bad("extra keys beside page keys: put what they say into the keys")
        return _sound(page_address.of_keys(keys, self._page_tokens))

    def _with_extra(self, frame: Tokens) -> Tokens:
        if self._has_keys:
            raise _bad("tokens after page keys: go on with keys")
        extra = self._extra_of(count(frame))
        if not _says_something(extra):
            return frame
        return _sound(page_address.with_extra(frame, extra, self._page_tokens, self.n_tokens))

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


class Prompt:
    """A prompt with a number. ``Node.lease``, ``match``, ``receive`` and ``send`` take it.

    The daemon keeps its tokens from the first call on, 32 MiB of a session at most, and drops those
    that were used longest ago. A call then tells them anew, by itself. So it does after a restart.
    """

    def __init__(self, port: Port, address: PromptAddress) -> None:
        """Use ``Node.prompt``."""
        self._port = port
        self._address = address
        self._number = port.connection.next_call()
        self._told_tokens = 0

    @property
    def n_tokens(self) -> int:
        """How long it is; of pages with keys, a whole page each."""
        return self._address.n_tokens

    def extend(
        self, tokens: TokenIds | None = None, *, keys: Sequence[bytes] | None = None
    ) -> None:
        """It goes on with these; the next call sends them, and no more.

        Raises:
            KvdError: ``bad-tokens``, ``bad-keys``.
        """
        more = self._address.following(tokens, keys)
        self._address.frame = Tokens(self._address.frame + more)
        self._address.took(more)

    def forget(self) -> None:
        """Nobody asks about it any more, so the daemon need not keep it; waits for nothing."""
        if self._told_tokens:
            self._told_tokens = 0
            forget = wire.ForgetPrompts(self._port.connection.next_call(), (self._number,))
            self._port.tell(forget)

    def is_of(self, port: Port) -> bool:
        """Whether it was made by the node that speaks through ``port``."""
        return self._port is port

    def address(self) -> PromptAddress:
        """As it is now, for a lease of it, which goes its own way."""
        return self._address.copy()

    async def perform(
        self,
        request: wire.ABOUT_PROMPTS,
        frame: Tokens,
        *,
        about: Record | None = None,
        within_s: float = ANSWER_WITHIN_S,
    ) -> Call:
        """``Port.perform`` about the prompt as it was when ``frame`` was all of it."""
        known_tokens = min(self._told_tokens, count(frame))
        # Before the answer: the daemon reads in order, and what it does not know it says.
        self._told_tokens = count(frame)
        try:
            return await self._port.perform(
                request,
                tokens=Tokens(frame[known_tokens * ID_BYTES :]),
                known=KnownPrompt(self._number, known_tokens),
                about=about,
                within_s=within_s,
            )
        except KvdError as error:
            if error.refusal.code is not Code.PROMPT_UNKNOWN or not known_tokens:
                raise
        return await self._port.perform(
            replace(request, call=self._port.connection.next_call()),
            tokens=frame,
            known=KnownPrompt(self._number, 0),
            about=about,
            within_s=within_s,
        )


def address_of(
    pools: Pools,
    tokens: TokenIds | Prompt | None,
    keys: Sequence[bytes] | None,
    extra_keys: ExtraKeys | None,
) -> PromptAddress:
    """What a call says of its prompt, as an address."""
    if not isinstance(tokens, Prompt):
        return PromptAddress(pools.match_page_tokens, tokens, keys, extra_keys)
    if keys is not None or extra_keys is not None:
        why = "keys beside a Prompt: say them when it is made"
        raise KvdError(Refusal(Code.BAD_KEYS, why, side="client"))
    return tokens.address()


def perform_about(
    port: Port,
    request: wire.ABOUT_PROMPTS,
    prompt: PromptAddress | None,
    *,
    about: Record | None = None,
    within_s: float = ANSWER_WITHIN_S,
) -> Coroutine[Any, Any, Call]:
    """``Port.perform`` with a prompt, told or named; with none, about that of the lease.

    Raises:
        KvdError: as ``Port.perform``; ``bad-request`` for a ``Prompt`` of another node.
    """
    frame = prompt.frame if prompt is not None else NO_TOKENS
    if prompt is not None and prompt.handle is not None:
        if not prompt.handle.is_of(port):
            raise KvdError(foreign(port, "Prompt", "make one with prompt() of this node"))
        return prompt.handle.perform(request, frame, about=about, within_s=within_s)
    return port.perform(request, tokens=frame, about=about, within_s=within_s)


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
