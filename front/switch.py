"""An Ethernet switch in user space: links of a chosen rate and latency between emulated hosts.

Run as ``python -m relaxmpi.switch HOSTS LATENCY BYTE_RATE MTU QUEUE`` by `relaxmpi.lab`: it makes
the hosts, writes one line of JSON with the open files that hold them, forwards frames, and ends
when its standard input does.

Each link is a pair of queues. A frame leaves its host once the host's uplink is free, takes its
size over the rate, and arrives one latency later, once the downlink of the receiver has carried
it as well; an idle downlink adds nothing (the switch cuts through). The uplink is lossless: what
does not fit waits inside the sender, as before a network card. The downlink has a drop-tail
queue, as a port of a switch has.
"""

import json
import os
import select
import sys
import time
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from relaxmpi.namespaces import Host, make_host, set_timer_slack

__all__ = ["forward", "wire_bytes"]

_VNET_HEADER = 10
_TCP_HEADERS = 14 + 20 + 32  # Ethernet, IPv4, TCP with time stamps
_LARGEST = 65536 + 128

# Reading ahead of the uplink's clock by this much keeps a link busy although the switch may be
# woken late on a machine whose cores are all taken.
_AHEAD = 0.004


def wire_bytes(frame: bytes) -> int:
    """Return the bytes that a frame takes on the wire, once cut into segments.

    Args:
        frame: As read from a TAP device: a virtio header of 10 bytes, then the Ethernet frame,
            which may be a TCP super-frame of up to 64 KiB for the network card to cut.
    """
    size = len(frame) - _VNET_HEADER
    if frame[1]:
        segment = frame[4] | frame[5] << 8
        size += ((size - _TCP_HEADERS + segment - 1) // segment - 1) * _TCP_HEADERS
    return size


def forward(
    hosts: Sequence[Host], control: int, latency: float, byte_rate: float, limit: float
) -> None:
    """Forward frames until ``control`` is readable or closed.

    Args:
        hosts: The hosts; a link joins each to the switch.
        control: An open file.
        latency: Seconds one way.
        byte_rate: Bytes per second of each link and direction.
        limit: Bytes that may wait for a downlink; what exceeds them is dropped.
    """
    taps = [host.tap for host in hosts]
    port_of = {tap: port for port, tap in enumerate(taps)}
    by_mac = {host.mac: port for port, host in enumerate(hosts)}
    others = [[p for p in range(len(taps)) if p != port] for port in range(len(taps))]
    queues: list[deque[tuple[float, bytes]]] = [deque() for _ in taps]
    # Frames are read ahead, so they take their turn on a downlink when they arrive, not before.
    arrivals: list[tuple[float, int, int, float, bytes]] = []
    count = 0
    up = [0.0] * len(taps)  # when each uplink is free again
    down = [0.0] * len(taps)
    longest = limit / byte_rate
    clock, read, write = time.monotonic, os.read, os.write
    while True:
        now = clock()
        while arrivals and arrivals[0][0] <= now:
            arrived, _, port, wire, frame = heappop(arrivals)
            if down[port] - arrived <= longest:
                down[port] = max(arrived, down[port] + wire)
                queues[port].append((down[port], frame))
        wake = min(now + 3600.0, arrivals[0][0]) if arrivals else now + 3600.0
        listen = [control]
        for port, queue in enumerate(queues):
            while queue and queue[0][0] <= now:
                try:
                    write(taps[port], queue.popleft()[1])
                except OSError:
                    pass  # the host's receive queue is full: lost, as on a network card
            if queue and queue[0][0] < wake:
                wake = queue[0][0]
            free = up[port] - _AHEAD
            if free <= now:
                listen.append(taps[port])
            elif free < wake:
                wake = free
        ready = select.select(listen, [], [], max(0.0, wake - clock()))[0]
        if not ready:
            continue
        now = clock()
        for tap in ready:
            if tap == control:
                return
            source = port_of[tap]
            free = max(up[source], now)
            while free - now <= _AHEAD:
                try:
                    frame = read(tap, _LARGEST)
                except BlockingIOError:
                    break
                wire = wire_bytes(frame) / byte_rate
                free += wire
                target = by_mac.get(frame[10:16])
                for port in others[source] if target is None else (target,):
                    count += 1
                    heappush(arrivals, (free + latency, count, port, wire, frame))
            up[source] = free


def _hurry() -> None:
    """Let the switch go before the ranks that it serves.

    Real time keeps 95 % of 1 Gbit/s when every core is busy with ranks, a better nice value
    80 %. The switch sleeps most of the time, and the kernel's limit on real time holds anyway.
    """
    set_timer_slack()
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:  # no real time in this control group
        os.setpriority(os.PRIO_PROCESS, 0, -10)


def main() -> None:
    """Make the hosts and join them."""
    hosts = int(sys.argv[1])
    latency, byte_rate, mtu = float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    made = [make_host(number, mtu) for number in range(1, hosts + 1)]
    _hurry()
    print(json.dumps([[host.net, host.uts] for host in made]), flush=True)
    forward(made, sys.stdin.fileno(), latency, byte_rate, float(sys.argv[5]))


if __name__ == "__main__":
    main()
