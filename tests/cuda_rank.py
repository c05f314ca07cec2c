"""One rank of a test of RankedK2: `python -m tests.cuda_rank BACKEND FOLDER MEETING RANK COUNT DIRECT OUT`."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from hedgerow.model.batch import SequenceRows
from hedgerow.model.cuda_ranked import RankedK2
from kernels.collectives import connect
from kernels.sample import Law
from kernels.tree_accept import WalkRows

ROOT = Path(__file__).resolve().parents[1]
TAPS, PATIENCE = (1, 0), 100.0
PARENTS = (-1, 0, 0, 1, 1, 3, 5, 2)
LAWS = [Law(0.0, 0, 1.0, 0.0, 1, 0, 12), Law(0.9, 20, 0.95, 0.0, (1 << 63) - 5, 3, 12)]


def steps(model: Any, length: int = 70, repeats: int = 4) -> list[torch.Tensor]:
    """Logits and features of two prompts' chunks, then `repeats` steps of trees in one pass: drawn paths, features,
    logits again, and the latents that they left. From the second of a shape on the step is a graph."""
    cache, found, vocabulary = model.new_cache(6), list[torch.Tensor](), model.config.vocab_size
    prompts = [[(11 * i + 5 + 7 * n) % vocabulary for i in range(length - 2 * n)] for n in range(2)]
    pages = ((4, 1), (2, 3))
    for n, tokens in enumerate(prompts):
        last = len(tokens) - 1
        out = model.forward([SequenceRows(0, pages[n], tokens, range(-1, last), [last], True)], cache)
        found += [out.logits.cpu().clone(), out.features.clone()]
    lengths, tokens = [len(prompt) for prompt in prompts], [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]]
    for _ in range(repeats):
        rows = [
            SequenceRows(lengths[n], pages[n], tokens[n], PARENTS, range(len(PARENTS)), limit=128) for n in range(2)
        ]
        trees = [WalkRows(n * len(PARENTS), PARENTS, tokens[n], LAWS[n]) for n in range(2)]
        verified = model.verify(rows, cache, trees)
        found.append(verified.features.clone())
        for n, walked in enumerate(verified.walked):
            found.append(torch.tensor([*walked.path, walked.bonus]))
            lengths[n] += len(walked.path)
            tokens[n] = [walked.bonus, *tokens[n][1:]]
        logits = model.forward(rows, cache).logits
        found.append(logits.cpu().clone())
    if hasattr(cache, "read"):  # a group's cache is every rank's
        found.append(cache.read(range(6 * 64)).float())
    return found


def run(backend: str, folder: Path, count: int, direct: bool, aside: Path) -> list[list[torch.Tensor]]:
    """What each rank found. `direct`: over the ranks' own memory."""
    outs, logs = [aside / f"{rank}.pt" for rank in range(count)], [aside / f"{rank}.log" for rank in range(count)]
    module = [sys.executable, "-m", "tests.cuda_rank", backend, str(folder), str(aside / "meeting")]
    env = os.environ | ({} if direct else {"NCCL_P2P_DISABLE": "1"})
    ranks = list[subprocess.Popen[bytes]]()
    for rank, (out, log) in enumerate(zip(outs, logs, strict=True)):
        told = [*module, str(rank), str(count), str(int(direct)), str(out)]
        with log.open("wb") as said:
            ranks.append(subprocess.Popen(told, cwd=ROOT, env=env, stdout=said, stderr=subprocess.STDOUT))
    try:
        within = time.monotonic() + PATIENCE
        while time.monotonic() < within and all(rank.poll() in (None, 0) for rank in ranks):
            if all(rank.poll() == 0 for rank in ranks):
                return [torch.load(out, weights_only=True) for out in outs]
            time.sleep(0.05)
        ended = [rank.poll() for rank in ranks]
        for rank in ranks:
            rank.send_signal(signal.SIGABRT)  # whoever still runs tells where
            rank.wait(10)
        raise AssertionError(f"ranks ended with {ended}:\n" + "\n".join(log.read_text()[-3000:] for log in logs))
    finally:
        for rank in ranks:
            rank.kill()


def main() -> None:
    faulthandler.enable()
    backend, folder, meeting, rank, count, direct, out = sys.argv[1:]
    given: Any = backend
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", int(rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    nobody = patch("hedgerow.model.cuda_ranked.share", lambda *arguments: None)
    if direct == "0":
        nobody.start()
    with torch.inference_mode():
        model = RankedK2.of(Path(folder), TAPS, device, connect(given, meeting, int(rank), int(count), 60), dtype)
        assert model.direct == (direct == "1"), "the ranks' memory is used where it should not be, or is not"
        torch.save(steps(model) if device.type == "cuda" else steps(model, 4, 1), out)
    os._exit(0)  # NCCL would wait for the graphs that it is captured in


if __name__ == "__main__":
    main()
