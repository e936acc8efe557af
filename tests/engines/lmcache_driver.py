"""An engine of LMCache's own benchmark, told line by line what to do: runs beside LMCache.

``python lmcache_driver.py RPC_URL HTTP_URL``. ``put N`` stores a prompt, ``get N`` fetches what is
found of it into blocks of zeros and holds it against what was stored, ``clear`` empties the
server's own memory. Each answer is a line of JSON.
"""

from __future__ import annotations

import json
import sys
from inspect import signature

from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig

TOKENS = 1024
SHAPE = "(2,256,16,4,32):bfloat16:8"


class Driver:
    def __init__(self, rpc_url: str, http_url: str) -> None:
        config = BenchConfig(
            rpc_url=rpc_url,
            http_url=http_url,
            mode="cpu",
            transfer_mode="engine_driven",
            tp_size=1,
            use_mla=False,
            num_tokens=TOKENS,
            kvcache_shape_spec=SHAPE,
            num_blocks=256,
            block_size=16,
        )
        self._client = ServerBenchClient(config, lambda line: sys.stderr.write(f"{line}\n"))
        self._client.start()
        self._stored: dict[int, list[str]] = {}
        self._calls = 0

    def _begun(self, number: int, kind: str):
        self._calls += 1
        create = self._client.create_request
        tokens = range(number * 100_000, number * 100_000 + TOKENS + 1)
        # From 0.5.7 on it does not make them itself.
        more = {"token_ids": tuple(tokens)} if "token_ids" in signature(create).parameters else {}
        request = create(number, f"{kind}-{number}-{self._calls}", kind, **more)
        found = self._client.lookup(request)
        return request, found.hit_chunks * request.chunk_size if found.succeeded else 0

    def put(self, number: int) -> dict[str, object]:
        request, found = self._begun(number, "cold")
        count = request.num_full_tokens
        self._stored[number] = self._sums(request, count, "store")
        done = self._client.store(request, start_token=found, token_count=count - found)
        self._end(request)
        return {"found": found, "stored": done is None or done.succeeded, "tokens": count}

    def get(self, number: int) -> dict[str, object]:
        request, found = self._begun(number, "warm")
        is_right = None
        if found:
            self._client.zero_destination(request, start_token=0, token_count=found)
            done = self._client.retrieve(request, start_token=0, token_count=found)
            sums = self._sums(request, found, "retrieve")
            is_right = done.succeeded and sums == self._stored[number][: len(sums)]
        self._end(request)
        return {"found": found, "is_right": is_right}

    def _end(self, request) -> None:
        # From 0.5.7 on a request has blocks of its own, which are given back too.
        end = getattr(self._client, "release_request", None) or self._client.end_session
        end(request)

    def _sums(self, request, count: int, operation: str) -> list[str]:
        """Of each chunk, as the engine has it."""
        compute = self._client.compute_checksums
        # From 0.5.7 on they are those of each rank, of which there is one.
        more = {"operation": operation} if "operation" in signature(compute).parameters else {}
        sums = compute(request, start_token=0, token_count=count, **more)
        return next(iter(sums.values())) if isinstance(sums, dict) else sums

    def clear(self) -> dict[str, object]:
        self._client._require_started().clear(True).result(timeout=30)
        return {}


def main(rpc_url: str, http_url: str) -> None:
    driver = Driver(rpc_url, http_url)
    # Not ``sys.stdout``, which LMCache may have replaced.
    with open(1, "w", encoding="utf-8", buffering=1, closefd=False) as answers:
        answers.write(json.dumps({"ready": True}) + "\n")
        for line in sys.stdin:
            verb, *numbers = line.split()
            answers.write(json.dumps(getattr(driver, verb)(*map(int, numbers))) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
