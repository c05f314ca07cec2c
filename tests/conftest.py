"""Pins the arithmetic before torch is loaded, as the services do: without it a row's bits depend on the row count."""

from __future__ import annotations

import os

from hedgerow.model.blas import pin_blas

pin_blas(os.environ)

import torch  # noqa: E402  (after pin_blas: MKL reads its mode once)

torch.set_num_threads(min(2, os.cpu_count() or 1))
