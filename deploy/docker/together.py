"""A verifier and its drafter in one container: where a box has no GPU to spare, and two containers cannot share one.

    python3 -m deploy.docker.together /etc/hedgerow     # settings in verifier/HEDGEROW_* and drafter/HEDGEROW_*

The container is the verifier: it ends when the verifier ends, with its status. The drafter can only make it faster, so
one that dies is started again, and it is stopped last. Each has the HEDGEROW_* variables of its own folder alone, one
file a variable, since a service refuses what it does not know; the container's own go to neither. Others of the
container are for both; one that begins with DRAFTER__ or VERIFIER__ is that one's alone, without that.

A signal is passed on to the verifier, also one that comes before there is one; a second one ends everything at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from hedgerow.rpc import ending

PREFIX = "HEDGEROW_"
FIRST_DELAY, LAST_DELAY = 1.0, 30.0  # seconds between starts of a drafter that ends
PATIENCE = 10.0  # seconds for a drafter to stop, then it is killed
COMMANDS = {name: (sys.executable, "-m", f"services.{name}") for name in ("verifier", "drafter")}
OWN = {name: f"{name.upper()}__" for name in COMMANDS}


def environment(folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """`base` without any HEDGEROW_* variable, and those of the folder, whose name is the service's. Raises OSError."""
    own = {path.name: path.read_text() for path in sorted(folder.iterdir()) if path.name.startswith(PREFIX)}
    kept = {name: value for name, value in base.items() if not name.startswith((PREFIX, *OWN.values()))}
    mine = OWN[folder.name]
    return kept | {name.removeprefix(mine): base[name] for name in base if name.startswith(mine)} | own


async def keep_drafter(env: Mapping[str, str], at_once: asyncio.Event) -> None:
    """Runs the drafter, and again when it ends, until it is cancelled; then it has PATIENCE, or none once `at_once`."""
    delay, clock = FIRST_DELAY, asyncio.get_running_loop().time
    while True:
        began = clock()
        starting = asyncio.create_task(asyncio.create_subprocess_exec(*COMMANDS["drafter"], env=env))
        try:
            process = await asyncio.shield(starting)
            status = await process.wait()
        except asyncio.CancelledError:
            await stop(await starting, at_once)
            raise
        delay = FIRST_DELAY if clock() - began > LAST_DELAY else delay
        print(f"together: the drafter ended with {status}; starting it again in {delay:g} s", file=sys.stderr)
        await asyncio.sleep(delay)
        delay = min(2 * delay, LAST_DELAY)


async def stop(process: asyncio.subprocess.Process, at_once: asyncio.Event) -> None:
    """SIGTERM, then SIGKILL."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    ended, hurried = asyncio.create_task(process.wait()), asyncio.create_task(at_once.wait())
    await asyncio.wait([ended, hurried], timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if not ended.done():
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    await ended


class Signals:
    """What was asked of the container: once is to end in order, twice is at once."""

    def __init__(self) -> None:
        self.verifier: asyncio.subprocess.Process | None = None
        self.asked, self.at_once = asyncio.Event(), asyncio.Event()
        for number in ending.STOP:
            asyncio.get_running_loop().add_signal_handler(number, self._came)

    def _came(self) -> None:
        if self.asked.is_set():
            self.at_once.set()
        self.asked.set()
        if self.verifier is not None and self.verifier.returncode is None:
            self.verifier.terminate()


async def run(settings: Path, base: Mapping[str, str]) -> int:
    """The verifier's exit status."""
    signals = Signals()  # before anything is started, which a signal would leave behind
    given = {name: environment(settings / name, base) for name in COMMANDS}
    verifier = signals.verifier = await asyncio.create_subprocess_exec(*COMMANDS["verifier"], env=given["verifier"])
    if signals.asked.is_set():
        verifier.terminate()
    drafter = asyncio.create_task(keep_drafter(given["drafter"], signals.at_once))
    status = await verifier.wait()
    drafter.cancel()
    await asyncio.wait([drafter])
    return status if status >= 0 else 128 - status


def main() -> None:
    """A signal that comes before it can be passed on ends the container."""
    ending.from_the_start()
    sys.exit(asyncio.run(run(Path(sys.argv[1]), os.environ)))


if __name__ == "__main__":
    main()
