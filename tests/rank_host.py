"""A host of a group as a process.

`python -m tests.rank_host LEADER SECRET HOST RANKS HOSTS FOLDER ADDRESS [CA CERT KEY]`
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from hedgerow.certificates import Tls, client_context
from hedgerow.engine.rank_door import Split
from hedgerow.engine.rank_host import Joins, RankHost
from tests.certificates import Files

ROOT = Path(__file__).resolve().parents[1]
SECRET = "a secret of this test"


class Host:
    """The process, and what it logs."""

    def __init__(
        self,
        port: int,
        folder: Path,
        host: int = 1,
        split: Split | None = None,
        secret: str = SECRET,
        out: Path | None = None,
        files: Files | None = None,
    ) -> None:
        of = split or Split(2, 2)
        words = [
            f"127.0.0.1:{port}",
            secret,
            str(host),
            str(of.ranks),
            str(of.hosts),
            str(folder),
            f"127.0.0.{host + 1}",
            *([] if files is None else [str(files.ca), str(files.cert), str(files.key)]),
        ]
        self.log = (out or folder.parent) / f"host-{host}-{port}.log"
        with self.log.open("a") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.rank_host", *words], cwd=ROOT, stderr=file, text=True
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    def ranks(self) -> list[int]:
        """Its rank processes."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
                if parent == str(self.process.pid) and b"rank_process" in (process / "cmdline").read_bytes():
                    found.append(int(process.name))
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)


@contextlib.contextmanager
def hosts(*made: Host) -> Iterator[None]:
    """Ends them."""
    try:
        yield
    finally:
        for host in made:
            host.end()


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    leader, secret, host, ranks, count, folder, address, *files = sys.argv[1:]
    tls = (lambda: client_context(Tls(*files))) if files else None
    joins = Joins(leader, secret.encode(), int(host), Split(int(ranks), int(count)), address, tls)
    RankHost(joins, Path(folder), threads=1).run()


if __name__ == "__main__":
    main()
