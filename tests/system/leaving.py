"""A client that leaves its session, and one that goes on with it later: processes for `lab exec`.

python -m tests.system.leaving ADDRESS            # reads some tokens, detaches, tells where it was as JSON
python -m tests.system.leaving ADDRESS POSITION   # goes on from there to the end
python -m tests.system.leaving ADDRESS --whole    # the same generation, undisturbed
"""

from __future__ import annotations

import asyncio
import json
import sys

from hedgerow.client import AsyncClient

READ, TOKENS = 40, 600


async def main(address: str, what: str) -> None:
    """One line of JSON on standard output."""
    tokens: list[int] = []
    async with AsyncClient(address) as client:
        if what in ("", "--whole"):
            stream = client.generate("class Store:\n", max_tokens=TOKENS, temperature=0.8, seed=7, ignore_eos=True)
        else:
            session_id, offset, digest, text_offset = json.loads(what)
            stream = client.resume(session_id, offset, bytes.fromhex(digest), text_offset)
        async for chunk in stream:
            tokens += chunk.tokens
            if what == "" and len(tokens) >= READ:
                session_id, offset, digest, text_offset = await stream.detach()
                print(json.dumps({"tokens": tokens, "position": [session_id, offset, digest.hex(), text_offset]}))
                return
    print(json.dumps({"tokens": tokens}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""))
