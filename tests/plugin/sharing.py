"""Whether ranks of this machine can share memory: then the library must."""

import os
import platform
import subprocess
import sys
from functools import cache

import numpy as np
import pytest


@cache
def can_share():
    """Whether another process may open a file of this one that has no name."""
    if platform.machine() != "x86_64":
        return False
    fd = os.memfd_create("probe")
    try:
        line = f"open('/proc/{os.getpid()}/fd/{fd}', 'r+b')"
        return not subprocess.call([sys.executable, "-c", line], stderr=subprocess.DEVNULL)
    finally:
        os.close(fd)


def needs_sharing():
    """Skip where ranks send messages, as they should."""
    if not can_share():
        pytest.skip("ranks of this machine cannot share memory")


@cache
def can_read():
    """Whether another process may read the memory of this one: a child, which asks for less."""
    secret = np.frombuffer(os.urandom(16), np.uint8)
    code = f"""
import numpy as np
from relaxmpi.primitives.pulls import Reader
found = np.zeros(16, np.uint8)
read = Reader().read({os.getpid()}, {secret.ctypes.data}, found.ctypes.data, 16)
raise SystemExit(not (read and found.tobytes() == {secret.tobytes()!r}))
"""
    return can_share() and not subprocess.call([sys.executable, "-c", code])


def needs_reading():
    """Skip where ranks take two copies, as they should."""
    if not can_read():
        pytest.skip("ranks of this machine cannot read each other's memory")
