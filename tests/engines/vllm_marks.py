"""``vllm serve`` that notes when its scheduler does what with a request; for ``first_token``.

Run by the interpreter of an environment that has vLLM, with vLLM's own arguments; ``MARKS`` names
a file. Each mark is a line of JSON there: what, which request, and the clock that all processes of
a host share. They are of vLLM's scheduler and of the hooks that it has for any connector, so they
mean the same with each. ``NIXL_PAUSE_US`` gives the progress thread of NIXL's agents a pause, which
its Python API does not: two idle agents take two cores otherwise.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
import time
from typing import Any


def note(what: str, request: str) -> None:
    """Write one mark."""
    said = {"what": what, "request": request, "at_s": time.monotonic()}
    os.write(MARKS, json.dumps(said).encode() + b"\n")


def mark_scheduler(scheduler: Any) -> None:
    """Note when a request comes, and when a step that computed tokens of it is over."""
    add, over = scheduler.add_request, scheduler.update_from_output

    @functools.wraps(add)
    def add_request(self: Any, request: Any) -> Any:
        note("came", request.request_id)
        return add(self, request)

    @functools.wraps(over)
    def update_from_output(self: Any, output: Any, *given: Any, **more: Any) -> Any:
        for request in output.num_scheduled_tokens:
            note("stepped", request)
        return over(self, output, *given, **more)

    scheduler.add_request, scheduler.update_from_output = add_request, update_from_output


def mark_connector(connector: Any) -> None:
    """Note what a connector's scheduler half says."""
    matched, given_blocks = (
        connector.get_num_new_matched_tokens,
        connector.update_state_after_alloc,
    )
    heard, ordered = connector.update_connector_output, connector.build_connector_meta

    def get_num_new_matched_tokens(request: Any, n_tokens: int) -> Any:
        found = matched(request, n_tokens)
        if found[0] is not None:
            note("matched", request.request_id)
        return found

    def update_state_after_alloc(request: Any, blocks: Any, n_tokens: int) -> Any:
        note("blocks", request.request_id)
        return given_blocks(request, blocks, n_tokens)

    def update_connector_output(output: Any) -> Any:
        for request in output.finished_recving or ():
            note("loaded", request)
        return heard(output)

    def build_connector_meta(output: Any) -> Any:
        told = ordered(output)
        for request in output.num_scheduled_tokens:
            note("step", request)
        return told

    connector.get_num_new_matched_tokens = get_num_new_matched_tokens
    connector.update_state_after_alloc = update_state_after_alloc
    connector.update_connector_output = update_connector_output
    connector.build_connector_meta = build_connector_meta


def mark_connectors(factory: Any) -> None:
    """Each one that is made from now on."""
    make = factory.create_connector

    def create_connector(*given: Any, **more: Any) -> Any:
        made = make(*given, **more)
        if getattr(made, "role", None) is not None and made.role.name == "SCHEDULER":
            mark_connector(made)
        return made

    factory.create_connector = create_connector


def pause_nixl(delay_us: int) -> None:
    """Have agents look for progress so often."""
    from nixl._api import nixl_agent  # noqa: PLC0415 - only where it is measured

    bindings = sys.modules[nixl_agent.__module__].nixlBind
    make = bindings.nixlAgent

    def agent(name: str, configuration: Any) -> Any:
        configuration.pthrDelay = delay_us
        return make(name, configuration)

    bindings.nixlAgent = agent


def patch() -> None:
    """In this process; the engine's own imports this file too, since it is spawned."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
        KVConnectorFactory,
    )
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415 - reads the environment

    mark_scheduler(Scheduler)
    mark_connectors(KVConnectorFactory)
    if delay_us := os.environ.get("NIXL_PAUSE_US"):
        pause_nixl(int(delay_us))


MARKS = os.open(os.environ["MARKS"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
patch()

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
