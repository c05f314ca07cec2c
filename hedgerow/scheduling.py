"""Who runs first where a forward pass and the services share the cores.

Linux lets a thread that runs finish its time slice before another that wakes up gets the core, unless the other one has
asked for a shorter slice (EEVDF, Linux 6.12: sched_setattr(2), sched_runtime of SCHED_OTHER). Event loops ask for a
short one, the threads that compute for a long one, so that a step's tokens pass through four processes while the
next step computes. Where it cannot be asked for, nothing changes but that delay.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from pathlib import Path

SHORT, LONG = 100_000, 3_000_000  # nanoseconds; the kernel takes 0.1 to 100 ms
_SYSCALL = {"x86_64": 314, "aarch64": 274}  # sched_setattr
# size, policy, flags, nice, priority, runtime, deadline, period, least and most utilisation
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")

CPU_LIMIT = Path(
    "/sys/fs/cgroup/cpu.max"
)  # of this process's container (cgroup v2): "<quota> <period>" or "max <period>"


def usable_cores(limit: Path = CPU_LIMIT) -> int:
    """Cores that this process may use: of its affinity, and of what its container's CPU limit allows; at least one.

    `os.cpu_count` tells the machine's, of which a container or `taskset` may leave few: a thread for each of them would
    be threads that wait for each other.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = limit.read_text().split()
        allowed = cores if quota == "max" else -(-int(quota) // int(period))
    except (OSError, ValueError):  # no such limit here
        allowed = cores
    return max(1, min(cores, allowed))


def ask_for_slice(nanoseconds: int, thread: int = 0) -> bool:
    """Asks for a time slice for a thread, 0: this one, and for those that it starts from now on. Whether it was heard.

    A thread under a policy of its own (real time, batch, idle) is left alone: its slice is its operator's.
    """
    number = _SYSCALL.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return False
    try:
        if os.sched_getscheduler(thread) != os.SCHED_OTHER:
            return False
        nice = os.getpriority(os.PRIO_PROCESS, thread)
    except OSError:  # it has ended
        return False
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, nanoseconds, 0, 0, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, thread, wanted, 0) == 0)
