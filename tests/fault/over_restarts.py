"""What engines do around the restart of a daemon whose pool outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from kvd.client import KvdError
from tests.fault.checked import GONE, Checked, give_back, known_of, prompt_of
from tests.fault.jobs import Report
from tests.fault.prompts import PAGE_TOKENS

if TYPE_CHECKING:
    from kvd.client import Lease, Node
    from tests.fault.jobs import Burst, Check, Hold
    from tests.fault.prompts import Memory

LOOK_EVERY_S = 0.02


async def burst(node: Node, memory: Memory, job: Burst) -> None:
    """Commit one after the other; what is not in the pool yet takes the place of older prompts."""
    for prompt in job.prompts:
        tokens, keys = prompt_of(prompt)
        lease = await node.lease(tokens, namespace=prompt.namespace, deadline_s=1.0)
        _fill(memory, lease, keys, lease.prefix_len // PAGE_TOKENS)
        await give_back(lease, commit=True)


async def hold(node: Node, memory: Memory, job: Hold, checked: Checked) -> Report:
    """Half of it is cached, the other half is the lease's own."""
    tokens, keys = prompt_of(job.prompt)
    half = len(tokens) // 2
    lease = await node.lease(
        tokens[:half],
        namespace=job.prompt.namespace,
        reserve_tokens=len(tokens) - half,
        deadline_s=2.0,
    )
    is_former = 0
    try:
        _fill(memory, lease, keys, lease.prefix_len // PAGE_TOKENS)
        with contextlib.suppress(KvdError):  # the daemon may die in the middle of it
            await lease.commit()
            _fill(memory, lease, keys, half // PAGE_TOKENS)
        until_s = time.monotonic() + job.most_s
        while time.monotonic() < until_s:
            if lease.record.lost is not None and not node.is_away:
                break
            await asyncio.sleep(LOOK_EVERY_S)
        await asyncio.sleep(job.hold_s)
        checked.must_be_kept(lease)
        if lease.record.is_row_known:
            checked.look(memory, lease, keys, "held over a restart")
        if lease.record.lost is not None:
            is_former = 1
            await _refuses_commit(lease, checked)
    finally:
        await give_back(lease, commit=False)
    return Report(job.id, "", former=is_former)


async def check(node: Node, memory: Memory, job: Check, checked: Checked) -> Report:
    """Lease what is cached of each, no more, so that nothing has to go for it."""
    seen: set[int] = set()
    places = []
    for place, known in enumerate(job.known):
        tokens, keys = known_of(known)
        space = known.prompt.namespace
        matched = (await node.match(tokens, namespace=space)).tokens // PAGE_TOKENS
        if not matched:
            continue
        places.append(place)
        lease = await node.lease(tokens[: matched * PAGE_TOKENS], namespace=space, deadline_s=1.0)
        pages = lease.pages.tolist()
        checked.look(memory, lease, keys[:matched], f"cached, of {known}")
        seen.update(pages[:matched])
        await give_back(lease, commit=False)
    return Report(job.id, "", pages=sorted(seen), places=places)


def _fill(memory: Memory, lease: Lease, keys: list[bytes], first: int) -> None:
    pages = lease.pages.tolist()
    for place in range(first, len(keys)):
        memory.write(pages[place], keys[place])


async def _refuses_commit(lease: Lease, checked: Checked) -> None:
    try:
        await lease.commit()
    except KvdError as refused:
        if refused.code not in GONE | {"before-restart"}:
            checked.wrong.append(f"a commit to a lease of before the restart: {refused}")
    else:
        checked.wrong.append("a lease of before the restart could be committed to")
