"""A prompt that the daemon keeps for this session, and how a call names it.

A scheduler asks about one prompt many times. With a ``Prompt`` in the place of its tokens, each
call sends what the daemon has not seen of it yet, which is most often nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from kvd.client.connection import KnownPrompt
from kvd.client.port import ANSWER_WITHIN_S, foreign
from kvd.client.prompt_address import PromptAddress
from kvd.errors import Code, KvdError, Refusal
from kvd.types import ID_BYTES, NO_TOKENS, Tokens, count
from kvd.wire import client as wire

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from kvd.client.connection import Call
    from kvd.client.pool import Pools
    from kvd.client.port import Port
    from kvd.client.state import Record
    from kvd.client.tokens import TokenIds
    from kvd.wire.page_address import ExtraKeys


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
