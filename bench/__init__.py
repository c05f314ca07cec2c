"""What measures. Importing it pins BLAS, which must happen before torch loads, as the services do."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from hedgerow.errors import HedgerowError
from hedgerow.model.blas import pin_blas

pin_blas(os.environ)


def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """In place of a traceback, one line where what is wrong is the machine or the command line."""
    if isinstance(error, HedgerowError):
        print(f"error: {error}", file=sys.stderr)
    elif isinstance(error, ModuleNotFoundError) and error.name == "triton":
        print("error: needs the package triton, which is not installed: `make setup` does", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


if sys.argv[:1] == ["-m"]:  # of `python -m bench.NAME`, while that is looked for
    sys.excepthook = tell
