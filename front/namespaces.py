"""Linux namespaces: emulated hosts, and a place for jobs that leaves nothing behind.

The namespaces here have no names. They live as long as a process or an open file refers to
them, so that the end of the processes is all the cleaning that is ever needed.
"""

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "IPC",
    "MOUNT",
    "NET",
    "PID",
    "UTS",
    "Host",
    "address",
    "die_with_parent",
    "enter",
    "make_host",
    "mount",
    "set_timer_slack",
    "unshare",
]

MOUNT, UTS, IPC, PID, NET = 0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000

MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29
_SIGKILL = 9

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_OFFLOADS = 0x01 | 0x02 | 0x04  # checksums and TCP segmentation over IPv4 and IPv6
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
_SIOCSIFMTU, _SIOCSIFHWADDR, _SIOCSIFTXQLEN = 0x8922, 0x8924, 0x8943
_UP_AND_RUNNING = 0x1 | 0x40
_ETHERNET = 1

# As of a network card. With a shorter queue the sender's own kernel drops frames, and the loss
# costs TCP more than any queue (an all-reduce of 4 MiB at 200 Mbit/s: 500 ms instead of 280).
_SEND_QUEUE = 1000

_libc = ctypes.CDLL(None, use_errno=True)


class Host(NamedTuple):
    """One emulated host, held by open files."""

    tap: int
    net: int
    uts: int
    mac: bytes


def _check(result: int, doing: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{doing}: {os.strerror(number)}")


def unshare(kinds: int) -> None:
    """Move this process (for PID: its children) into new namespaces."""
    _check(_libc.unshare(kinds), "cannot make a namespace")


def enter(namespace: int) -> None:
    """Move this process into the namespace that the open file refers to."""
    _check(_libc.setns(namespace, 0), "cannot enter a namespace")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0) -> None:
    """Mount a file system, or change how one is mounted."""
    result = _libc.mount(
        source.encode(),
        target.encode(),
        None if kind is None else kind.encode(),
        ctypes.c_ulong(flags),
        None,
    )
    _check(result, f"cannot mount {target}")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0), "cannot follow the parent")


def set_timer_slack() -> None:
    """Have the kernel wake this process when it asks, not up to 50 us later."""
    _check(_libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0), "cannot set timer slack")


def address(host: int) -> str:
    """Return the address of a host, counted from 1."""
    return f"10.78.0.{host}"


def _set(name: str, *values: str) -> None:
    """Set a kernel parameter of this network namespace to the first value that it accepts."""
    for value in values:
        with contextlib.suppress(OSError):
            Path("/proc/sys/net", name).write_text(value)
            return


def make_host(number: int, mtu: int) -> Host:
    """Make one host with an interface eth0, and leave this process inside it.

    Args:
        number: Which host, from 1; it gives the name, the address and the hardware address.
        mtu: Largest packet of the interface in bytes.

    Raises:
        OSError: If the kernel refuses a namespace or the interface.
    """
    unshare(NET | UTS)
    socket.sethostname(f"host{number}")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", b"eth0", kind))
    fcntl.ioctl(tap, _TUNSETOFFLOAD, _OFFLOADS)
    mac = bytes((2, 0x78, 0, 0, 0, number))
    # The same TCP everywhere, so that figures can be compared: Linux' usual one, or where the
    # machine is set up for another, the one that is always allowed and behaves much like it.
    _set("ipv4/tcp_congestion_control", "cubic", "reno")
    # No router solicitations and the like: they would share the emulated links with the job.
    _set("ipv6/conf/eth0/disable_ipv6", "1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:

        def configure(request: int, interface: bytes, layout: str, *values: object) -> None:
            fcntl.ioctl(control, request, struct.pack("16s" + layout, interface, *values))

        configure(_SIOCSIFHWADDR, b"eth0", "H6s16x", _ETHERNET, mac)
        configure(_SIOCSIFMTU, b"eth0", "i20x", mtu)
        configure(_SIOCSIFTXQLEN, b"eth0", "i20x", _SEND_QUEUE)
        for request, text in ((_SIOCSIFADDR, address(number)), (_SIOCSIFNETMASK, "255.255.255.0")):
            configure(request, b"eth0", "HH4s16x", socket.AF_INET, 0, socket.inet_aton(text))
        for interface in (b"eth0", b"lo"):
            configure(_SIOCSIFFLAGS, interface, "H22x", _UP_AND_RUNNING)
    net = os.open("/proc/self/ns/net", os.O_RDONLY)
    uts = os.open("/proc/self/ns/uts", os.O_RDONLY)
    return Host(tap, net, uts, mac)
