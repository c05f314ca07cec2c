"""Which verifier holds which prefix blocks: hints for routing, each with a life of its own."""

from __future__ import annotations

from collections.abc import Sequence

from services.kvstore.records import Holder
from services.kvstore.replies import sound
from services.kvstore.runner import Runner
from services.kvstore.scripts import Call, Script

MOST_HOLDERS = 64
"""Verifiers remembered for one block; those that expire last stay."""
ROUND = 128
"""Blocks that are looked up in one round trip; a prompt's search ends with the first round that nobody holds."""


class Prefixes:
    """Blocks are named by hashes that cover all blocks before them."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._put, self._find = Script("put_prefix", shared=False), Script("find_prefix", shared=False)

    async def put(self, verifier: str, blocks: Sequence[bytes], ttl: int) -> None:
        """`verifier` holds `blocks` for `ttl` milliseconds."""
        arguments = (verifier.encode(), b"%d" % ttl, b"%d" % MOST_HOLDERS)
        for reply in await self.runner.call_all([Call(self._put, (_key(block),), arguments) for block in blocks]):
            sound(reply)

    async def find(self, blocks: Sequence[bytes]) -> list[Holder]:
        """Every verifier that holds the first block, with how many it holds from there on; longest first."""
        runs: dict[str, int] = {}
        for start in range(0, len(blocks), ROUND):
            calls = [Call(self._find, (_key(block),), ()) for block in blocks[start : start + ROUND]]
            for i, reply in enumerate(await self.runner.call_all(calls), start):
                for verifier in (name.decode() for name in sound(reply)):
                    if runs.get(verifier, 0) == i:  # it held every block before this one
                        runs[verifier] = i + 1
            if max(runs.values(), default=0) < min(start + ROUND, len(blocks)):
                break
        return sorted((Holder(*run) for run in runs.items()), key=lambda holder: (-holder.blocks, holder.verifier))


def _key(block: bytes) -> bytes:
    return b"hedgerow:prefix:{%b}" % block.hex().encode()
