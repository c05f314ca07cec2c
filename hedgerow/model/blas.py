"""Pins the mode of the BLAS library. Imports no torch: the mode is read once, when torch loads."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping

MKL_MODE = "AVX2,STRICT"


def pin_blas(environ: MutableMapping[str, str]) -> None:
    """Sets MKL_CBWR in `environ`, which must be the process's own, before torch is imported.

    In this mode a row's bits do not depend on the row count from 4 rows on (`hedgerow.model.invariance` checks it). A
    value that is already set is kept: the check at start then decides what it is worth.

    Raises RuntimeError if torch is loaded already: then the call would do nothing, silently.
    """
    if "torch" in sys.modules and environ.get("MKL_CBWR") != MKL_MODE:
        raise RuntimeError("pin_blas() must run before torch is imported")
    environ.setdefault("MKL_CBWR", MKL_MODE)
