"""A job on emulated hosts, in a process tree of its own that ends as a whole.

Run as ``python -m relaxmpi.job SPEC`` by `relaxmpi.lab`. The job gets its own process numbers,
its own /dev/shm and its own /etc/hosts: when its first process ends, the kernel ends all
others, also those that put themselves into the background, and the files in /dev/shm are gone.
A file system of the machine is never written to.

This process ends the job when its standard input ends, thus when the lab does, however it does.
"""

import json
import os
import re
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from relaxmpi.namespaces import (
    IPC,
    MOUNT,
    MS_BIND,
    MS_PRIVATE,
    MS_REC,
    PID,
    address,
    die_with_parent,
    enter,
    mount,
    unshare,
)

__all__ = ["AGENT", "SCRATCH", "Spec"]

SCRATCH = "/dev/shm"
AGENT = f"{SCRATCH}/agent"
_LOST_RACE = re.compile(rb"\[host\d+:\d+\] plm:ssh: Warning: setpgid\(.*\n")


class Spec(NamedTuple):
    """What to run and where.

    Attributes:
        namespaces: The open files of the network and the name of each host.
        command: The launcher and its arguments; it starts on the first host.
    """

    namespaces: list[tuple[int, int]]
    command: list[str]


def _agent(namespaces: Sequence[tuple[int, int]]) -> str:
    """Return what stands in for ssh: a script that takes an address and a command.

    It opens the files of this job's first process, number 1, which has them all.
    """
    cases = "\n".join(
        f"{address(host)}) net={net} uts={uts};;"
        for host, (net, uts) in enumerate(namespaces, start=1)
    )
    return (
        f'#!/bin/sh\nto=$1; shift\ncase "$to" in\n{cases}\n'
        '*) echo "no emulated host $to" >&2; exit 1;;\nesac\n'
        'exec nsenter --net=/proc/1/fd/$net --uts=/proc/1/fd/$uts /bin/sh -c "$*"\n'
    )


def _furnish(namespaces: Sequence[tuple[int, int]]) -> None:
    """Give the job its own /proc, /dev/shm, /etc/hosts and ssh stand-in."""
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount("proc", "/proc", "proc")
    mount("tmpfs", SCRATCH, "tmpfs")
    agent = Path(AGENT)
    agent.write_text(_agent(namespaces))
    agent.chmod(0o700)
    if Path("/etc/hosts").exists():
        # The second form is what a socket of both IP versions calls its peer; torch looks it up.
        names = [
            f"{address(n)} host{n}\n::ffff:{address(n)} host{n}-mapped"
            for n in range(1, len(namespaces) + 1)
        ]
        table = Path(f"{SCRATCH}/hosts")
        table.write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        mount(str(table), "/etc/hosts", flags=MS_BIND)


def _launch(spec: Spec) -> int:
    """Start the launcher on the first host; return its process number."""
    child = os.fork()
    if child:
        return child
    try:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these two
            signal.signal(number, signal.SIG_DFL)
        for namespace in spec.namespaces[0]:
            enter(namespace)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execvp(spec.command[0], spec.command)
    except OSError as error:
        print(f"relaxmpi lab: cannot start {spec.command[0]}: {error}", file=sys.stderr)
    os._exit(127)


def _status(wait_status: int) -> int:
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else 128 - code


def _first_process(spec: Spec) -> int:
    """Be process 1 of the job: run the launcher, reap what it leaves, return its status."""
    die_with_parent()
    try:
        _furnish(spec.namespaces)
    except OSError as error:
        print(f"relaxmpi lab: {error}; in a container, start it with --privileged", file=sys.stderr)
        return 1
    launcher = _launch(spec)
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(launcher, number))
    while True:
        process, status = os.wait()
        if process == launcher:
            return _status(status)


def _copy_errors(source: int) -> bool:
    """Copy what is there of the job's standard error; return whether there may be more.

    The launcher warns, at about every second start, of a race that it has lost and that does
    not matter; in front of every table that a script prints, that would alarm people.
    """
    errors = os.read(source, 65536)
    os.write(2, _LOST_RACE.sub(b"", errors))
    return bool(errors)


def main() -> int:
    """Run the job of the specification in the first argument; return its exit status."""
    namespaces, command = json.loads(sys.argv[1])
    spec = Spec([(net, uts) for net, uts in namespaces], command)
    errors, errors_of_job = os.pipe()
    unshare(PID | MOUNT | IPC)
    first = os.fork()
    if first == 0:
        os.dup2(errors_of_job, 2)
        os._exit(_first_process(spec))
    os.close(errors_of_job)
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(first, number))
    lab = sys.stdin.fileno()
    while True:  # until no process of the job is left to write an error
        ready = select.select([errors, lab], [], [])[0]
        if lab in ready:
            os.kill(first, signal.SIGKILL)
            break
        if not _copy_errors(errors):
            break
    return _status(os.waitpid(first, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
