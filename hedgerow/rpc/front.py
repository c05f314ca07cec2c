"""TLS in front of a store that speaks plain, in the same pod: what comes over TLS goes to its Unix socket, and back.

python -m hedgerow.rpc.front LISTEN SOCKET CERT KEY CA
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hedgerow.rpc import ending


def main(arguments: Sequence[str]) -> None:
    """A signal ends it from here on, so everything else is imported after that."""
    ending.from_the_start()
    from hedgerow.certificates import Tls
    from hedgerow.rpc.logs import set_up_logging
    from hedgerow.rpc.passing import run
    from hedgerow.rpc.work import run_service

    if len(arguments) != 5:
        sys.exit(__doc__)
    listen, target, cert, key, ca = arguments
    set_up_logging("redis", "info", "json")
    run_service(run(listen, Path(target), Tls(Path(ca), Path(cert), Path(key))))


if __name__ == "__main__":
    main(sys.argv[1:])
