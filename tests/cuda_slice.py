"""Eight layers of K2.6 at their true shapes: `python -m tests.cuda_slice MEETING MINE RANK COUNT OUT`.

Weights are drawn. MINE of eight parts of the heads, widths and words, which COUNT ranks divide: all 8, as two ranks
have them; or 2, so that each of two has what one of eight has, and its kernels. RANK "all": one process that computes
all ranks. Else one of them, on the GPU of that number: over the ranks' own memory, then gathered by NCCL.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch

from bench.rank_model import Drawn, rank_config, rank_sizes
from hedgerow.model.batch import SequenceRows
from hedgerow.model.cuda_ranked import RankedK2
from hedgerow.model.tensors import Share
from kernels.collectives import Ranks, connect
from kernels.sample import Law
from kernels.tree_accept import WalkRows

LAYERS, TAPS, PAGES, LIMIT = 8, (1, 4, 6), 8, 500
PROMPTS = (200, 130, 64, 1)  # tokens; one chunk each, in one step
TREES = ((1, 1), (1, 8), (1, 16), (1, 64), (4, 16), (4, 64))  # sequences, rows of each
LAWS = [
    Law(0.0, 0, 1.0, 0.0, 1, 0, LIMIT), Law(0.9, 20, 0.95, 0.0, (1 << 63) - 5, 3, LIMIT),
    Law(0.0, 0, 1.0, 0.0, 2, 0, LIMIT), Law(0.7, 0, 1.0, 0.0, 5, 0, LIMIT),
]  # fmt: skip
Found = list[tuple[str, str]]  # what, and the hash of its bits or what it is


def drawn(mine: int, ranks: Ranks, device: torch.device) -> RankedK2:
    readers = [Drawn(device, share=Share(rank, ranks.count)) for rank in ranks.mine]
    return RankedK2(rank_config(rank_sizes(LAYERS, mine)), readers, ranks, TAPS)


def steps(model: RankedK2) -> Found:
    """Chunks of prompts, then trees whose second row is what will be drawn; each shape also as a graph."""
    cache, found, vocabulary = model.new_cache(PAGES * len(PROMPTS)), Found(), model.config.vocab_size
    pages = [[PAGES * n + (5 * i + 3) % PAGES for i in range(PAGES)] for n in range(len(PROMPTS))]
    texts = [[(7919 * i + 31 * n + 5) % vocabulary for i in range(length)] for n, length in enumerate(PROMPTS)]
    chunk = [
        SequenceRows(0, mine, text, range(-1, len(text) - 1), [len(text) - 1], True)
        for mine, text in zip(pages, texts, strict=True)
    ]
    out = model.forward(chunk, cache)
    anchors, lengths = out.logits.argmax(-1).tolist(), list(PROMPTS)
    found += [("logits of prompts", hashed(out.logits)), ("features of prompts", hashed(out.features))]

    def verify(trees: list[list[int]]) -> list[int]:
        parents = [(row - 1) // 2 for row in range(1, len(trees[0]))]
        every = [-1, *parents]
        rows = [
            SequenceRows(lengths[n], pages[n], tree, every, range(len(every)), limit=LIMIT)
            for n, tree in enumerate(trees)
        ]
        walks = [WalkRows(n * len(every), every, tree, LAWS[n]) for n, tree in enumerate(trees)]
        verified = model.verify(rows, cache, walks)
        name = f"{len(trees)} x {len(every)}"
        found.append((f"features of {name}", hashed(verified.features)))
        found.extend((f"path of {name}", f"{[*one.path]} {one.bonus}") for one in verified.walked)
        found.append((f"logits of {name}", hashed(model.forward(rows, cache).logits)))
        paths.extend(len(one.path) for one in verified.walked)
        return [one.bonus for one in verified.walked]

    for sequences, rows in TREES:
        for _ in range(2):
            paths = list[int]()
            next_ones = verify([[anchor] for anchor in anchors[:sequences]])
            rest = [[(13 * row + n) % vocabulary for row in range(2, rows)] for n in range(sequences)]
            trees = [([anchors[n], next_ones[n], *rest[n]])[:rows] for n in range(sequences)]
            paths = list[int]()
            anchors[:sequences] = verify(trees)
            for n, length in enumerate(paths):
                lengths[n] += length
            assert rows == 1 or min(paths) > 1, "what was drawn is not drawn again"
    slots = [64 * pages[n][at // 64] + at % 64 for n, length in enumerate(lengths) for at in range(length)]
    found.append(("latents", hashed(cache.read(slots))))
    return found


def hashed(tensor: torch.Tensor) -> str:
    assert tensor.isfinite().all()
    return hashlib.sha256(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def main() -> None:
    meeting, mine, rank, ranks, out = sys.argv[1:]
    count = int(ranks)
    device = torch.device("cuda", 0 if rank == "all" else int(rank))
    torch.cuda.set_device(device)
    with torch.inference_mode():
        if rank == "all":
            found = {"all": steps(drawn(int(mine), Ranks(count), device))}
        else:
            peers = connect("nccl", meeting, int(rank), count, 90)
            model = drawn(int(mine), peers, device)
            assert model.direct, "the ranks' memory is not used"
            found = {"direct": steps(model)}
            model.gather()
            assert not model.direct
            found["gathered"] = steps(model)
    Path(out).write_text(json.dumps(found))
    os._exit(0)  # NCCL would wait for the graphs that it is captured in


if __name__ == "__main__":
    main()
