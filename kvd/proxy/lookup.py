"""The tokens of a prompt, and how many of them each node has.

A daemon of this host is asked, in tokens. Of other engines the proxy knows what it sent there
itself. No question waits long: a request is better sent anywhere than held.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

import aiohttp

import kvd.client
from kvd.errors import KvdError
from kvd.proxy.bodies import prompt_bytes, token_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvd.proxy.bodies import Body
    from kvd.proxy.engines import ProxiedEngine

ASK_S: Final = 0.1
"""For the answer of a daemon."""

TOKENIZE_S: Final = 1.0
"""For the tokens of a prompt."""

AGAIN_S: Final = 5.0
"""After a daemon did not answer."""


BLOCK_BYTES: Final = 256
"""What is remembered as one; some 64 tokens."""

BYTES_A_TOKEN: Final = 4
"""Of text, about; of token ids exactly."""

MOST_BLOCKS: Final = 200_000
"""Of one engine: prompts of some 13 million tokens in some 25 MB."""


class CachedPrompt(NamedTuple):
    """A prompt: its length in tokens, as far as that is known, and how much of it each node has."""

    n_tokens: int
    cached: dict[ProxiedEngine, int]


class ServedPrefixes:
    """The beginnings of prompts that one engine was sent, block by block: a guess at its cache.

    It knows nothing of evictions and of what came by other ways, and forgets what was not seen for
    longest.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def cached_tokens(self, prompt: bytes) -> int:
        """About how many of the prompt's tokens it was sent before, from the start."""
        blocks = 0
        for block in _blocks(prompt):
            if block not in self._seen:
                break
            self._seen.move_to_end(block)
            blocks += 1
        return blocks * BLOCK_BYTES // BYTES_A_TOKEN

    def note(self, prompt: bytes) -> None:
        """It was sent this prompt."""
        # The end first: what is forgotten first must be an end, or the start of it is of no use.
        for block in reversed(list(_blocks(prompt))):
            self._seen[block] = None
            self._seen.move_to_end(block)
        while len(self._seen) > self._most_blocks:
            self._seen.popitem(last=False)


class DaemonLink:
    """A session with one daemon, opened when it is first asked."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._node: kvd.client.Node | None = None
        self._again_s = float("-inf")
        self._opening = asyncio.Lock()

    async def cached_tokens(self, tokens: Sequence[int], namespace: str) -> int | None:
        """How much of the prompt is cached there; None if it did not say in time."""
        if time.monotonic() < self._again_s:
            return None
        try:
            async with asyncio.timeout(ASK_S):
                async with self._opening:
                    if self._node is None:
                        self._node = await kvd.client.connect(
                            self._endpoint, name="proxy", return_within_s=ASK_S
                        ).__aenter__()
                return (await self._node.match(tokens, namespace=namespace)).tokens
        except (KvdError, TimeoutError, OSError):
            self._again_s = time.monotonic() + AGAIN_S
            await self.close()
            return None

    async def close(self) -> None:
        """End the session; the next question opens one."""
        node, self._node = self._node, None
        if node is not None:
            with contextlib.suppress(KvdError, OSError):
                await node.close()


class PromptLookup:
    """How many tokens of a prompt each node has."""

    def __init__(self, session: aiohttp.ClientSession, engines: Iterable[ProxiedEngine]) -> None:
        self._session = session
        self._engines = tuple(engines)
        self._served = {one: ServedPrefixes() for one in self._engines}
        daemons = {one.address.daemon for one in self._engines} - {""}
        self._links = {endpoint: DaemonLink(endpoint) for endpoint in daemons}

    async def close(self) -> None:
        """End all sessions."""
        for link in self._links.values():
            await link.close()

    def note(self, engine: ProxiedEngine, body: Body) -> None:
        """The prompt was sent to that engine."""
        self._served[engine].note(prompt_bytes(body))

    async def cached(self, body: Body) -> CachedPrompt:
        """Of the prompt of this request, at each engine."""
        prompt = prompt_bytes(body)
        tokens = await self._tokens_of(body) if self._links else None
        n_tokens = len(prompt) // BYTES_A_TOKEN if tokens is None else len(tokens)
        cached = {one: self._served[one].cached_tokens(prompt) for one in self._engines}
        if tokens is not None:
            asked = [one for one in self._engines if one.address.daemon]
            answers = await asyncio.gather(
                *(
                    self._links[one.address.daemon].cached_tokens(tokens, one.address.namespace)
                    for one in asked
                )
            )
            cached |= {
                one: found for one, found in zip(asked, answers, strict=True) if found is not None
            }
        return CachedPrompt(n_tokens, cached)

    async def _tokens_of(self, body: Body) -> list[int] | None:
        """The prompt in tokens, by the tokenizer of an engine; None if none would say."""
        given = token_ids(body.get("prompt"))
        if given is not None:
            return given
        kept = ("model", "prompt", "messages", "tools", "chat_template_kwargs")
        told = {key: body[key] for key in kept if key in body}
        limit = aiohttp.ClientTimeout(total=TOKENIZE_S)
        for engine in self._engines:
            if not engine.is_up:
                continue
            try:
                async with self._session.post(
                    f"{engine.address.url}/tokenize", json=told, timeout=limit
                ) as answer:
                    found = json.loads(await answer.read()) if answer.status == 200 else {}
            except (aiohttp.ClientError, TimeoutError, ValueError):
                return None
            return token_ids(found.get("tokens")) if isinstance(found, dict) else None
        return None


def _blocks(prompt: bytes) -> Iterator[bytes]:
    """Each whole block by a digest of all up to its end."""
    digest = blake2b(digest_size=16)
    for at in range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES):
        digest.update(prompt[at : at + BLOCK_BYTES])
        yield digest.digest()
