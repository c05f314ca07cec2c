"""A client that leaves its session, and one that goes on with it later. It runs in a pod, with the image's SDK alone:

    python3 - ADDRESS            # reads some tokens, detaches, tells where it was as JSON
    python3 - ADDRESS POSITION   # goes on from there to the end
    python3 - ADDRESS --whole    # the same generation, undisturbed

HEDGEROW_TLS_CA, where it is set, names the authorities of gateways that speak TLS.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from hedgerow.client import AsyncClient, Tls

READ, TOKENS = 40, 600


async def main(address: str, what: str) -> None:
    """One line of JSON on standard output."""
    tokens: list[int] = []
    authorities = os.environ.get("HEDGEROW_TLS_CA")
    async with AsyncClient(address, tls=Tls(ca=Path(authorities)) if authorities else None) as client:
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
