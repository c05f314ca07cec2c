"""Token streams on the training device and the windows that are cut out of them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from models.train import tokenizer_ids as tok
from models.train.pack import load


def read_stream(folder: Path, pattern: str, device: str) -> Tensor:
    """All pieces whose name matches, as one int16-sized stream on the device (ids fit: vocabulary 4,096)."""
    paths = sorted(folder.glob(f"{pattern}.u16.xz"))
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(load, paths))
    return torch.from_numpy(np.concatenate(parts).astype(np.int16)).to(device)


def windows(stream: Tensor, starts: Tensor, length: int) -> Tensor:
    """`[len(starts), length]` int64 ids."""
    index = starts[:, None] + torch.arange(length, device=stream.device)
    return stream[index].long()


def epochs(stream: Tensor, length: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Endless batches `[batch, length + 1]`; every pass has a random offset and a random order."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        offset = int(torch.randint(length, (1,), generator=draw))
        count = (len(stream) - offset - 1) // length
        order = torch.randperm(count, generator=draw).to(stream.device)
        for i in range(0, count - batch + 1, batch):
            yield windows(stream, offset + order[i : i + batch] * length, length + 1)


def random_windows(stream: Tensor, count: int, length: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(stream) - length, (count,), generator=draw)
    return windows(stream, starts.to(stream.device), length)


def chat_prompts(stream: Tensor, count: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Requests of chat pairs as they are served: from `<|im_user|>` to `</think>`; padded ids and lengths."""
    ends = (stream == tok.END_THINK).nonzero()[:, 0]
    starts = (stream == tok.IM_USER).nonzero()[:, 0]
    starts = starts[torch.searchsorted(starts, ends) - 1]
    fits = ends - starts + 1 <= length // 2
    starts, ends = starts[fits], ends[fits]
    draw = torch.Generator().manual_seed(seed)
    pick = torch.randint(len(starts), (count,), generator=draw).to(stream.device)
    starts, sizes = starts[pick], ends[pick] - starts[pick] + 1
    index = (starts[:, None] + torch.arange(length, device=stream.device)).clamp_max(len(stream) - 1)
    ids = stream[index].long()
    return ids.masked_fill_(torch.arange(length, device=stream.device) >= sizes[:, None], tok.PAD), sizes
