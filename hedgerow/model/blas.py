"""Pins the BLAS and thread libraries. Imports no torch: they read their environment once, when torch loads them."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping

PINNED = {
    # from 4 rows on a row's bits do not depend on the row count; `hedgerow.model.invariance` checks it
    "MKL_CBWR": "AVX2,STRICT",
    # idle threads sleep: spinning ones cost 5 to 10 times the step where other processes want the cores
    "OMP_WAIT_POLICY": "PASSIVE",
}

pinned: dict[str, str] = {}  # what `pin_blas` found or set, for the log


def pin_blas(environ: MutableMapping[str, str]) -> None:
    """Sets the variables of PINNED in `environ`, which must be the process's own, before torch is imported.

    A value that is set already is kept: the check at load then decides what it is worth.

    Raises RuntimeError if torch is loaded already and a value is missing: setting it now would do nothing, silently.
    """
    missing = [name for name in PINNED if name not in environ]
    if missing and "torch" in sys.modules:
        raise RuntimeError(f"pin_blas() must set {', '.join(missing)} before torch is imported")
    for name in missing:
        environ[name] = PINNED[name]
    pinned.update({name: environ[name] for name in PINNED})
