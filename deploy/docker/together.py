"""A verifier and its drafter in one container: where a box has no GPU to spare, and two containers cannot share one.

    python3 -m deploy.docker.together /etc/hedgerow     # settings in verifier/HEDGEROW_* and drafter/HEDGEROW_*

The container is the verifier: it ends when the verifier ends, with its status. The drafter can only make it faster, so
one that dies is started again, and it is stopped last. Each has the HEDGEROW_* variables of its own folder alone, one
file a variable, since a service refuses what it does not know; the container's own go to neither.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

PREFIX = "HEDGEROW_"
FIRST_DELAY, LAST_DELAY = 1.0, 30.0  # seconds between starts of a drafter that ends
PATIENCE = 10.0  # seconds for a drafter to stop, then it is killed
SIGNALS = (signal.SIGTERM, signal.SIGINT)
COMMANDS = {name: (sys.executable, "-m", f"services.{name}") for name in ("verifier", "drafter")}


def environment(folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """`base` without any HEDGEROW_* variable, and those of the folder. Raises OSError."""
    own = {path.name: path.read_text() for path in sorted(folder.iterdir()) if path.name.startswith(PREFIX)}
    return {name: value for name, value in base.items() if not name.startswith(PREFIX)} | own


async def keep_drafter(env: Mapping[str, str]) -> None:
    """Runs the drafter, and again when it ends, until it is cancelled."""
    delay, clock = FIRST_DELAY, asyncio.get_running_loop().time
    while True:
        began = clock()
        process = await asyncio.create_subprocess_exec(*COMMANDS["drafter"], env=env)
        try:
            status = await process.wait()
        except asyncio.CancelledError:
            await stop(process)
            raise
        delay = FIRST_DELAY if clock() - began > LAST_DELAY else delay
        print(f"together: the drafter ended with {status}; starting it again in {delay:g} s", file=sys.stderr)
        await asyncio.sleep(delay)
        delay = min(2 * delay, LAST_DELAY)


async def stop(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, then SIGKILL."""
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), PATIENCE)
    except TimeoutError:
        process.kill()
        await process.wait()


async def run(settings: Path, base: Mapping[str, str]) -> int:
    """The verifier's exit status."""
    verifier = await asyncio.create_subprocess_exec(*COMMANDS["verifier"], env=environment(settings / "verifier", base))
    loop = asyncio.get_running_loop()
    for number in SIGNALS:  # each one is passed on: the second one ends a drain
        loop.add_signal_handler(number, lambda: verifier.send_signal(signal.SIGTERM))
    drafter = asyncio.create_task(keep_drafter(environment(settings / "drafter", base)))
    status = await verifier.wait()
    drafter.cancel()
    await asyncio.wait([drafter])
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(asyncio.run(run(Path(sys.argv[1]), os.environ)))
