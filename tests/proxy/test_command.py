"""``kvd proxy`` on the command line: what is wrong is said before anything is served."""

from __future__ import annotations

import asyncio
import socket
import sys
import time

import pytest
from click.testing import CliRunner

from kvd.cli.proxy import proxy_command
from tests.proxy.engines import HERE, post, raw, say

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'f\r\ndata: {"n":1}\n\n\r\n'

ENGINE = ("--decode", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--decode"),
        (("--decode", "h:81"), "no address"),
        (("--decode", "http://h:81,daemon="), "its client socket"),
        (("--decode", "http://h:81,namespace=m"), "give daemon=ENDPOINT"),
        (("--prefill", "http://user:hunter2@h:99999", *ENGINE), "no address"),
        ((*ENGINE, "--listen", "8000"), "no HOST:PORT"),
        ((*ENGINE, "--limit", "prefil_s=3"), "prefill_s"),
        ((*ENGINE, "--limit", "prefill_s=0"), "above 0"),
        ((*ENGINE, "--listen", "::1:8000"), "no HOST:PORT"),
        ((*ENGINE, "--listen", "h:65536"), "no HOST:PORT"),
        ((*ENGINE, "--pass-path", "sleep"), "begins with /"),
        ((*ENGINE, "--pass-path", "/x/../sleep"), ".. segment"),
        ((*ENGINE, "--pass-path", "/sleep?level=1"), "no path"),
        ((*ENGINE, "--pass-path", "//"), "no path"),
        ((*ENGINE, *ENGINE), "twice"),
    ],
)
def test_what_is_wrong_is_said_in_words(arguments, said):
    found = CliRunner().invoke(proxy_command, arguments)
    assert found.exit_code == 2
    assert said in found.output
    assert "hunter2" not in found.output


def test_an_address_that_cannot_be_listened_at_is_said_in_words():
    with socket.socket() as taken:
        taken.bind((HERE, 0))
        taken.listen()
        listen = f"{HERE}:{taken.getsockname()[1]}"
        found = CliRunner().invoke(proxy_command, (*ENGINE, "--listen", listen))
    assert found.exit_code == 1
    assert f"Error: --listen {listen}: " in found.output
    assert "in use" in found.output


@pytest.mark.parametrize("events", [5, 1000])
async def test_what_was_begun_may_end_when_the_proxy_is_told_to_within_a_bound(events):
    has_come = asyncio.Event()

    async def stream(request):
        has_come.set()
        await request.says(STREAM)
        for _ in range(events):
            await request.says(EVENT)
            await asyncio.sleep(0.1)
        await request.says(b"0\r\n\r\n")

    with socket.socket() as free:
        free.bind((HERE, 0))
        listen = f"{HERE}:{free.getsockname()[1]}"
    async with raw(stream) as decode:
        arguments = ("--decode", decode.url, "--listen", listen, "--limit", "stop_s=4")
        proxy = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvd", "proxy", *arguments
        )
        try:
            for _ in range(300):
                await asyncio.sleep(0.1)
                try:
                    assert await say(f"http://{listen}", b"GET /health HTTP/1.0\r\n\r\n")
                    break
                except ConnectionError:
                    continue
            begun = post("/v1/completions", b'{"prompt": "x", "stream": true}')
            answer = asyncio.create_task(say(f"http://{listen}", begun, wait_s=20.0))
            await has_come.wait()
            began_s = time.monotonic()
            proxy.terminate()
            said = await answer
            assert await asyncio.wait_for(proxy.wait(), 20.0) == 0
        finally:
            if proxy.returncode is None:
                proxy.kill()
                await proxy.wait()
    assert time.monotonic() - began_s < 12.0
    # It has its end, or none: never one that looks like that of a whole answer.
    assert said.endswith(b"0\r\n\r\n") == (events == 5)
    assert said.count(b"data:") == events or events != 5
