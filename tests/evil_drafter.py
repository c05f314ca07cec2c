"""A drafter that is out for trouble: a real DrafterService whose answers are wrong, one kind after the other.

    python -m tests.evil_drafter --vocab 512 --layers 0,1 --width 128 --head 3f… --kinds cycle,huge

It describes itself as a drafter that fits, prints a ready line like a service, and writes to stdout what it answered.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from hedgerow.v1 import drafter_pb2, drafter_pb2_grpc

Nodes = tuple[list[int], list[int]]  # tokens, parents

TREES: dict[str, Callable[[int], Nodes]] = {
    "cycle": lambda vocab: ([1, 2, 3], [2, 0, 1]),
    "forward": lambda vocab: ([1, 2, 3], [-1, 2, -1]),
    "itself": lambda vocab: ([1, 2], [-1, 1]),
    "huge": lambda vocab: ([n % vocab for n in range(10_000)], [n - 1 for n in range(10_000)]),
    "token": lambda vocab: ([1, vocab], [-1, 0]),
    "twins": lambda vocab: ([1, 1], [-1, -1]),
    "parent": lambda vocab: ([1, 2], [-1, -5]),
    "ragged": lambda vocab: ([1, 2, 3], [-1]),
}
LATE, WRONG_STEP, STRANGER, SILENT = "late", "wrong_step", "stranger", "silent"
KINDS = (*TREES, LATE, WRONG_STEP, STRANGER, SILENT)
GOOD: Nodes = ([1, 2], [-1, 0])


class EvilDrafter(drafter_pb2_grpc.DrafterServiceServicer):
    """Answers each request with the next of `kinds`."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.kinds = itertools.cycle(options.kinds)
        self.incarnation = os.urandom(16)

    async def Describe(self, request: Any, context: Any) -> drafter_pb2.DrafterServiceDescribeResponse:
        return drafter_pb2.DrafterServiceDescribeResponse(
            model="evil",
            vocab_size=self.options.vocab,
            feature_layer_ids=self.options.layers,
            feature_width=self.options.width,
            block_size=8,
            max_budget=63,
            incarnation=self.incarnation,
            max_sequences=64,
            target_head_hash=self.options.head,
        )

    async def Draft(
        self, request_iterator: AsyncIterator[drafter_pb2.DraftRequest], context: Any
    ) -> AsyncIterator[drafter_pb2.DraftResponse]:
        async for request in request_iterator:
            if any(entry.budget for entry in request.sequences):
                kind = next(self.kinds)
                if kind == LATE:
                    await asyncio.sleep(self.options.late)
                if kind != SILENT:
                    yield self.answer(request, kind)
            else:
                yield drafter_pb2.DraftResponse(step_id=request.step_id, incarnation=self.incarnation)

    def answer(self, request: drafter_pb2.DraftRequest, kind: str) -> drafter_pb2.DraftResponse:
        wrong = 1_000_003 if kind == WRONG_STEP else 0
        response = drafter_pb2.DraftResponse(step_id=request.step_id + wrong, incarnation=self.incarnation)
        tokens, parents = TREES[kind](self.options.vocab) if kind in TREES else GOOD
        for entry in request.sequences:
            if entry.budget:
                number = entry.sequence + (1_000_003 if kind == STRANGER else 0)
                logprobs = [-0.5] * len(tokens)
                response.trees.add(
                    sequence=number, tokens=tokens, parents=parents, logprobs=logprobs, features_from=2**32 - 1
                )
        return response


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--vocab", type=int, required=True)
    parser.add_argument("--layers", type=lambda text: [int(n) for n in text.split(",")], required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--head", default="", help="hash of the target's embedding and head")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--late", type=float, default=0.3, help="seconds")
    options = parser.parse_args()
    server = grpc.aio.server()
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(EvilDrafter(options), server)
    port = server.add_insecure_port(options.listen)
    await server.start()
    print(f"ready drafter {port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
