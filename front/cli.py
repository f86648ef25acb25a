"""The command ``relaxmpi``."""

import argparse
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NamedTuple, NoReturn

from relaxmpi import __version__, doctor, lab, simulate
from relaxmpi.units import parse_bytes, parse_duration, parse_rate, with_unit

__all__ = ["main"]


class _Command(NamedTuple):
    """A subcommand: what it does, its options, and the function that does it.

    Attributes:
        passes: Whether options that it does not know are `arguments` of somebody else's.
    """

    summary: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    passes: bool = False


def _lab_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run an MPI program on emulated hosts of this machine, joined by a network of a chosen "
        "latency and bandwidth. Needs Linux, root and Open MPI 5. "
        "Example: relaxmpi lab --hosts 4 --latency 5ms --bandwidth 100Mbit -- python train.py"
    )
    parser.add_argument("--hosts", type=int, default=4, help="emulated hosts (default 4)")
    parser.add_argument("--ranks-per-host", type=int, default=1, metavar="N", help="(default 1)")
    parser.add_argument(
        "--latency", type=with_unit(parse_duration), default=1e-4, metavar="TIME",
        help="one way, such as 5ms or 100us (default 0.1ms)",
    )  # fmt: skip
    parser.add_argument(
        "--bandwidth", type=with_unit(parse_rate), default=1e9, metavar="RATE",
        help="of each host's link, up and down, such as 100Mbit (default 1Gbit)",
    )  # fmt: skip
    parser.add_argument("--mtu", type=int, default=1500, metavar="BYTES", help="(default 1500)")
    parser.add_argument(
        "--queue", type=with_unit(parse_bytes), metavar="SIZE",
        help="what may wait in the switch for a host's link, such as 16MB (default 1000 packets)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS",
        help="stop the job after this long, with exit status 124 (default 300)",
    )  # fmt: skip
    parser.add_argument("--mpirun", default="", metavar="OPTIONS", help="more options for mpirun")
    parser.add_argument("program", help="the program, after --; python is this interpreter")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _lab(options: argparse.Namespace) -> int:
    # The default action would end this process alone, at once. An exception lets the
    # with-statement stop the job politely, so that what it printed is not lost.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _stop)
    try:
        with lab.Lab(
            hosts=options.hosts,
            latency=options.latency,
            bandwidth=options.bandwidth,
            mtu=options.mtu,
            queue=options.queue,
        ) as network:
            return network.run(
                [options.program, *options.arguments],
                ranks_per_host=options.ranks_per_host,
                timeout=options.timeout,
                mpirun=shlex.split(options.mpirun),
            )
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (ValueError, lab.LabError) as error:
        print(f"relaxmpi lab: {error}", file=sys.stderr)
        return 2


_COMMANDS = {
    "doctor": _Command("check this installation", doctor.add_options, doctor.run),
    "lab": _Command("run an MPI program on an emulated slow network", _lab_options, _lab),
    "simulate": _Command(
        "predict what a network makes of a script, without the network",
        simulate.add_options,
        simulate.run,
        passes=True,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
        argv: The arguments, without the program's name; by default those of this process.
    """
    parser = argparse.ArgumentParser(prog="relaxmpi", description="MPI-style primitives.")
    parser.add_argument("--version", action="version", version=f"relaxmpi {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in _COMMANDS.items():
        # An abbreviation could be meant for the script.
        allowed = not command.passes
        added = subparsers.add_parser(name, help=command.summary, allow_abbrev=allowed)
        command.options(added)
    given = list(sys.argv[1:] if argv is None else argv)
    passing = given[:1] and given[0] in _COMMANDS and _COMMANDS[given[0]].passes
    if not passing:
        options = parser.parse_args(given)
    else:
        end = given.index("--") if "--" in given else len(given)
        options, unknown = parser.parse_known_args(given[:end])
        options.arguments = [*unknown, *given[end + 1 :]]
    return _COMMANDS[options.command].run(options)
