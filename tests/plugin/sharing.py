"""Whether ranks of this machine can share memory: then the library must."""

import os
import platform
import subprocess
import sys
from functools import cache

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
