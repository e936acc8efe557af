"""Dynamo's own router core, asked over its standard streams: a line of JSON in, one out.

Run by the interpreter that has ``ai-dynamo-runtime``, which has no kvd: nothing of ours is imported
here. ``{"register": {...}}`` and ``{"overlap": {...}}`` are what ``SelectionService`` takes.
"""

import asyncio
import json
import sys


async def serve() -> None:
    from dynamo._core import SelectionService  # noqa: PLC0415

    service = SelectionService()
    loop = asyncio.get_running_loop()
    while True:
        line = await loop.run_in_executor(None, sys.stdin.readline)
        if not line:
            break
        ((verb, given),) = json.loads(line).items()
        try:
            if verb == "register":
                answer = await service.upsert_worker(given)
            else:
                answer = await service.overlap_scores(given)
        except Exception as error:  # noqa: BLE001
            answer = {"error": repr(error)}
        print(json.dumps(answer, default=str), flush=True)  # noqa: T201
    service.shutdown()


asyncio.run(serve())
