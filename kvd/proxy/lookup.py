"""The tokens of a prompt, and how many of them each node has.

A daemon of this host is asked, in tokens, in the namespace of its engine. Engines of vLLM with
kvd's connector name that on their page of metrics, once they have had a request; it changes with
weights and options, so it is read again. Of other engines the proxy knows what it sent there
itself. No question waits long: a request is better sent anywhere than held.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from multidict import CIMultiDict

import kvd.client
from kvd.errors import Code, KvdError
from kvd.proxy.bodies import is_one_prompt, json_bytes, prompt_bytes, token_ids, worked
from kvd.proxy.engines import EngineState, soonest
from kvd.proxy.exchange import EngineCall, EngineFault, FaultKind, whole_of
from kvd.proxy.headers import own_request_headers
from kvd.proxy.metrics import NAMESPACE_METRIC, LookupEnd, namespaces_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvd.proxy.bodies import Body
    from kvd.proxy.engines import ProxiedEngine
    from kvd.proxy.exchange import EngineClient
    from kvd.proxy.headers import Headers
    from kvd.proxy.metrics import ProxyMetrics

ASK_S: Final = 0.1
"""For the answer of a daemon."""

TOKENIZE_S: Final = 1.0
"""For the tokens of a prompt."""

AGAIN_S: Final = 5.0
"""After a daemon answered nobody, or an engine gave no tokens in time."""

LONG_TOKENS: Final = 20_000
LONG_BYTES: Final = 4 * LONG_TOKENS
"""A prompt above that may have no answer in time where all others have."""

SESSION_OVER: Final = frozenset(
    code.value
    for code in (
        *(Code.UNKNOWN_SESSION, Code.BEFORE_RESTART, Code.POOL_CHANGED, Code.SHUTTING_DOWN),
        *(Code.CLIENT_GONE, Code.VERSIONS_DIFFER),
    )
)
"""Refusals that are not of a prompt."""

TOKENIZED: Final = ("model", "prompt", "messages", "tools", "chat_template_kwargs")
"""Of a request, what its tokens depend on."""

MOST_TOKENIZED_BYTES: Final = 4 * 2**20
"""A longer text is not worth an engine's time for this."""

NAMED_AGAIN_S: Final = 30.0
"""An engine that has named its namespace is asked again; meanwhile it may have become another."""

MOST_PAGE_BYTES: Final = 16 * 2**20

MOST_TOKENS_BYTES: Final = 32 * 2**20
OK: Final = 200

BLOCK_BYTES: Final = 256
"""What is remembered as one; some 64 tokens."""

BYTES_A_TOKEN: Final = 4
"""Of text, about; of token ids exactly."""

PULLED_TOKENS: Final = 64
"""Fewer than these are computed as soon as they are fetched."""

MOST_NOTED_BYTES: Final = 4 * 2**20
"""Of one prompt; behind it all are alike."""

MOST_BLOCKS: Final = 200_000
"""Of one engine: prompts of some 13 million tokens in some 25 MB."""


class CachedPrompt(NamedTuple):
    """A prompt, and how much of it each node has.

    Attributes:
        n_tokens: of it, as far as that is known.
        cached: of them, at each engine.
        said: the same, where a daemon has said it.
        beginning: of the prompt, in bytes that begin alike where prompts do.
        is_one: there are no further prompts in the request.
    """

    n_tokens: int
    cached: dict[ProxiedEngine, int]
    said: dict[ProxiedEngine, int]
    beginning: bytes
    is_one: bool


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
    """A session with one daemon, opened when it is first asked.

    A prompt that the daemon refuses is a matter of that prompt. One that it does not answer in time
    may be too: a long one, or one of many at once. Only while it answers nobody at all is it asked
    less often.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._node: kvd.client.Node | None = None
        self._again_s = float("-inf")
        self._answered_s = float("-inf")
        self._opening = asyncio.Lock()
        self.why = ""
        """It is not asked now because of this."""

    @property
    def node(self) -> str:
        """What its daemon is called; empty while that is not known."""
        return "" if self._node is None else self._node.name

    async def cached_tokens(self, tokens: Sequence[int], namespace: str) -> int | None:
        """How much of the prompt is cached there; None if it did not say in time."""
        began_s = time.monotonic()
        if began_s < self._again_s:
            return None
        try:
            async with asyncio.timeout(ASK_S):
                async with self._opening:
                    if self._node is None:
                        self._node = await kvd.client.connect(
                            self._endpoint, name="proxy", return_within_s=ASK_S
                        ).__aenter__()
                found = (await self._node.match(tokens, namespace=namespace)).tokens
        except KvdError as error:
            if error.code == Code.UNREACHABLE.value:
                await self._was_silent(began_s, len(tokens), str(error))
            elif error.code in SESSION_OVER:
                await self._leave(str(error))
            else:
                self._answered_s = time.monotonic()
            return None
        except (TimeoutError, OSError, RuntimeError) as error:
            why = str(error) or f"no answer within {ASK_S} s"
            await self._was_silent(began_s, len(tokens), why)
            return None
        self._answered_s = time.monotonic()
        self.why = ""
        return found

    async def _was_silent(self, began_s: float, n_tokens: int, why: str) -> None:
        # A long prompt may well take longer than it is given; that says nothing of the next one.
        since_s = began_s - (AGAIN_S if n_tokens > LONG_TOKENS else 0.0)
        if self._answered_s < since_s:
            await self._leave(why)

    async def _leave(self, why: str) -> None:
        self._again_s = time.monotonic() + AGAIN_S
        self.why = why
        await self.close()

    async def close(self) -> None:
        """End the session; the next question opens one."""
        node, self._node = self._node, None
        if node is not None:
            with contextlib.suppress(KvdError, OSError):
                await node.close()


@dataclass
class LookupCounts:
    """What came of the questions for the prompts of one engine.

    Attributes:
        asked: prompts that its daemon was asked for.
        answered: of them, in time and without a refusal.
        tokens: of the prompts answered.
        cached_tokens: of these, how many were cached.
        no_namespace: prompts that it was not asked for, because its engine has not named one.
    """

    asked: int = 0
    answered: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    no_namespace: int = 0


class EngineNamespaces:
    """In which namespace each engine keeps its prompts: as it was given, or as the engine says."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._named: dict[ProxiedEngine, str] = {}
        self._again_s: dict[ProxiedEngine, float] = {}
        self.why: dict[ProxiedEngine, str] = {}
        """Of an engine whose namespace is not known."""

    def of(self, engine: ProxiedEngine) -> str | None:
        """Its namespace; None if it has not said it."""
        given = engine.address.namespace
        return given if given is not None else self._named.get(engine)

    async def ask(self, engine: ProxiedEngine, wait_s: float) -> None:
        """Read it from the engine's page of metrics, unless it is given or was read lately.

        An engine that is late is believed what it said before; one that is down may come back as
        another.
        """
        if not engine.address.daemon or engine.address.namespace is not None:
            return
        now_s = asyncio.get_running_loop().time()
        if engine.state(now_s) is EngineState.DOWN:
            self._forget(engine, "the engine is down")
            return
        if now_s < self._again_s.get(engine, now_s):
            return
        headers = own_request_headers(CIMultiDict(), media="text/plain")
        if engine.address.authorization:
            headers["authorization"] = engine.address.authorization
        asks = EngineCall(method="GET", target="/metrics", headers=headers, anew=True)
        until_s = now_s + wait_s
        try:
            async with self._client.asked(engine, asks, until_s=until_s) as answer:
                page = await whole_of(answer, until_s=until_s, most_bytes=MOST_PAGE_BYTES)
                if answer.status != OK:
                    self._forget(engine, f"its /metrics says {answer.status}")
                    return
        except EngineFault as fault:
            self.why.setdefault(engine, f"its /metrics: {fault.why}")
            return
        found = namespaces_in(page)
        if len(found) == 1:
            self._named[engine] = found.pop()
            self._again_s[engine] = now_s + NAMED_AGAIN_S
            self.why.pop(engine, None)
        else:
            said = "several" if found else "none; vLLM does after its first request"
            self._forget(engine, f"its /metrics names {said} in {NAMESPACE_METRIC}")

    def _forget(self, engine: ProxiedEngine, why: str) -> None:
        self._named.pop(engine, None)
        self._again_s.pop(engine, None)
        self.why[engine] = why


class Tokenizers:
    """The tokens of prompts, by engines that serve ``/tokenize``."""

    def __init__(self, client: EngineClient, engines: Sequence[ProxiedEngine], wait_s: float):
        self._client = client
        self._engines = engines
        self._wait_s = wait_s
        self._again_s: dict[ProxiedEngine, float] = {}

    async def tokens_of(self, body: Body, headers: CIMultiDict[str]) -> list[int] | None:
        """A prompt in text, in tokens; None if no engine says it in time."""
        now_s = asyncio.get_running_loop().time()
        able = [engine for engine in self._engines if self._again_s.get(engine, now_s) <= now_s]
        chosen = soonest(able, {}, 0, now_s)
        if chosen is None:
            return None
        told = {key: body[key] for key in TOKENIZED if key in body}
        raw = json_bytes(told)
        if len(raw) > MOST_TOKENIZED_BYTES:
            return None
        asks = EngineCall(method="POST", target="/tokenize", headers=headers, body=raw)
        try:
            return await self._ask(chosen.engine, asks, now_s + self._wait_s)
        except EngineFault as error:
            if error.fault is not FaultKind.SLOW or len(raw) <= LONG_BYTES:
                # It is asked again soon, but does not hold every request meanwhile.
                self._again_s[chosen.engine] = asyncio.get_running_loop().time() + AGAIN_S
            return None

    async def _ask(
        self, engine: ProxiedEngine, asks: EngineCall, until_s: float
    ) -> list[int] | None:
        if engine.address.authorization:
            asks.headers["authorization"] = engine.address.authorization
        async with self._client.asked(engine, asks, until_s=until_s) as answer:
            raw = await whole_of(answer, until_s=until_s, most_bytes=MOST_TOKENS_BYTES)
            if answer.status != OK:
                return None
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            return None
        return token_ids(found.get("tokens")) if isinstance(found, dict) else None


class PromptLookup:
    """How many tokens of a prompt each node has."""

    def __init__(
        self,
        client: EngineClient,
        engines: Iterable[ProxiedEngine],
        metrics: ProxyMetrics,
        tokenize_s: float = TOKENIZE_S,
    ) -> None:
        self._metrics = metrics
        self._engines = tuple(engines)
        self._tokenizers = Tokenizers(client, self._engines, tokenize_s)
        self._served = {engine: ServedPrefixes() for engine in self._engines}
        daemons = {engine.address.daemon for engine in self._engines} - {""}
        self._links = {endpoint: DaemonLink(endpoint) for endpoint in daemons}
        self.namespaces = EngineNamespaces(client)
        self.counts = {engine: LookupCounts() for engine in self._engines if engine.address.daemon}

    async def close(self) -> None:
        """End all sessions."""
        for link in self._links.values():
            await link.close()

    def why_not_asked(self, engine: ProxiedEngine) -> str:
        """Why its daemon is not asked now; empty if it is."""
        if self.namespaces.of(engine) is None:
            return self.namespaces.why.get(engine, "")
        link = self._links.get(engine.address.daemon)
        return link.why if link is not None else ""

    async def _asked(self, engine: ProxiedEngine, tokens: list[int]) -> int | None:
        counts = self.counts[engine]
        labels = (engine.address.role.value, engine.address.url)
        namespace = self.namespaces.of(engine)
        if namespace is None:
            counts.no_namespace += 1
            self._metrics.lookups.labels(*labels, LookupEnd.NO_NAMESPACE.value).inc()
            return None
        counts.asked += 1
        found = await self._links[engine.address.daemon].cached_tokens(tokens, namespace)
        if found is None:
            self._metrics.lookups.labels(*labels, LookupEnd.NO_ANSWER.value).inc()
            return None
        counts.answered += 1
        counts.tokens += len(tokens)
        counts.cached_tokens += found
        self._metrics.lookups.labels(*labels, LookupEnd.ANSWERED.value).inc()
        self._metrics.lookup_tokens.labels(*labels, "cached").inc(found)
        self._metrics.lookup_tokens.labels(*labels, "lacking").inc(len(tokens) - found)
        return found

    def note(self, engine: ProxiedEngine, beginning: bytes) -> None:
        """A prompt that begins like this was sent to that engine."""
        self._served[engine].note(beginning)

    async def cached(
        self, body: Body, headers: Headers | None = None, n_bytes: int = 0
    ) -> CachedPrompt:
        """Of the prompt of this request, at each engine.

        Args:
            body: of the request.
            headers: what an engine that is asked for the tokens is told beside it.
            n_bytes: of the body; a long one is read beside the loop.
        """
        prompt, tokens, is_one = await worked(n_bytes, _read, body)
        if tokens is None and self._links and n_bytes <= MOST_TOKENIZED_BYTES:
            told = own_request_headers(headers if headers is not None else CIMultiDict())
            tokens = await self._tokenizers.tokens_of(body, told)
        n_tokens = len(prompt) // BYTES_A_TOKEN if tokens is None else len(tokens)
        guessed = {engine: self._served[engine].cached_tokens(prompt) for engine in self._engines}
        said: dict[ProxiedEngine, int] = {}
        if tokens is not None:
            asked = list(self.counts)
            answers = await asyncio.gather(*(self._asked(engine, tokens) for engine in asked))
            heard = zip(asked, answers, strict=True)
            said = {engine: found for engine, found in heard if found is not None}
        return CachedPrompt(n_tokens, guessed | said, said, prompt[:MOST_NOTED_BYTES], is_one)

    def fuller_node(self, engine: ProxiedEngine, prompt: CachedPrompt) -> str:
        """The node that has most of it, where that is more than this engine's own; else empty.

        Such is the next turn of a conversation, whose last answer lies where it was decoded. Only
        what daemons have said counts: KV of another namespace is of no use there.
        """
        mine = self.namespaces.of(engine)
        alike = [one for one in prompt.said if self.namespaces.of(one) == mine]
        if engine not in alike:
            return ""
        best = max(alike, key=lambda one: prompt.said[one])
        if prompt.said[best] < prompt.said[engine] + PULLED_TOKENS:
            return ""
        return self._links[best.address.daemon].node


def _read(body: Body) -> tuple[bytes, list[int] | None, bool]:
    """Its prompt as bytes, and as tokens where it is given so; whether it has one."""
    return prompt_bytes(body), token_ids(body.get("prompt")), is_one_prompt(body)


def _blocks(prompt: bytes) -> Iterator[bytes]:
    """Each whole block by a digest of all up to its end."""
    digest = blake2b(digest_size=16)
    for at in range(0, min(len(prompt), MOST_NOTED_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES):
        digest.update(prompt[at : at + BLOCK_BYTES])
        yield digest.digest()
