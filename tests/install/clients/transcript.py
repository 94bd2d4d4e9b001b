"""What a client says, as at Python's own prompt: transcript.py, with {"setup": CODE, "asked": {NAME: EXPRESSION}} as
its input.

The last line of the output is JSON: for each name what came, or {"raised": [CLASS, TEXT]}. A stream becomes a list.
"""

import asyncio
import dataclasses
import inspect
import json
import sys
from collections.abc import AsyncIterable, Iterator

SHOWN = 400  # characters of an answer


async def come(found):
    """What has come of it in the end."""
    if inspect.isawaitable(found):
        found = await found
    if isinstance(found, AsyncIterable):
        return [item async for item in found]
    return list(found) if isinstance(found, Iterator) else found


def plain(found):
    """As JSON has it."""
    if isinstance(found, Exception):
        return {"raised": [f"{type(found).__module__}.{type(found).__qualname__}", str(found)]}
    if hasattr(found, "model_dump"):
        return found.model_dump(mode="json")
    return dataclasses.asdict(found) if dataclasses.is_dataclass(found) else str(found)


asked, space, said = json.load(sys.stdin), {}, {}
print(asked["setup"].strip())
with asyncio.Runner() as runner:
    exec(asked["setup"], space)
    for name, expression in asked["asked"].items():
        try:
            said[name] = runner.run(come(eval(expression, space)))
            shown = str(said[name])
        except Exception as e:
            said[name] = plain(e)
            shown = ": ".join(said[name]["raised"])
        print(f">>> {expression}\n{shown if len(shown) <= SHOWN else shown[:SHOWN] + ' ...'}")
print(json.dumps(said, default=plain))
