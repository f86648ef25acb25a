"""``relaxmpi simulate``: an unchanged mpirun script on a network that nobody has."""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relaxmpi.units import parse_duration, parse_rate, with_unit

if TYPE_CHECKING:
    from relaxmpi.primitives.simulation.simulated import SimulatedWorld

__all__ = ["add_options", "run"]

_WATCHDOG = 120.0  # imports and training steps of a busy machine are no reason to warn


def _measured(text: str) -> float:
    if text == "measured":
        return 1.0
    try:
        factor = float(text)
    except ValueError:
        factor = -1.0
    if not 0.0 <= factor < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither 'measured' nor a factor")
    return factor


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.description = (
        "Run a script for mpirun on simulated ranks, in one process, and print what the network "
        "would make of it. The script is not changed: Comm.world() inside it is the simulated "
        "one. Its real computation takes no time unless --compute is given; comm.compute(seconds) "
        "always counts. Options may stand before or after the script; those that are not listed "
        "here, and everything after --, go to the script. The same seed gives the same output, "
        "except with --compute. Rank 0's output is shown."
    )
    parser.add_argument("script", type=Path, help="a Python file")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="(default 4)")
    parser.add_argument(
        "--ranks-per-node", type=int, default=1, metavar="N", help="they share a link (default 1)"
    )
    parser.add_argument(
        "--latency", type=with_unit(parse_duration), default=50e-6, metavar="TIME",
        help="between nodes, one way, such as 50us (default)",
    )  # fmt: skip
    parser.add_argument(
        "--bandwidth", type=with_unit(parse_rate), default=10e9, metavar="RATE",
        help="line rate of each node's Ethernet link, each way, such as 10Gbit (default)",
    )  # fmt: skip
    parser.add_argument(
        "--local-latency", type=with_unit(parse_duration), default=1e-6, metavar="TIME",
        help="inside a node (default 1us)",
    )  # fmt: skip
    parser.add_argument(
        "--local-bandwidth", type=with_unit(parse_rate), default=40e9, metavar="RATE",
        help="of each rank inside a node (default 40Gbit)",
    )  # fmt: skip
    parser.add_argument(
        "--jitter", type=float, default=0.0, metavar="FRACTION",
        help="computations take up to this much longer, at random: 0.1 is 10 %% (default 0)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of all that is random (default 0)")
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="FACTOR",
        help="each array stands for one so many times longer (default 1)",
    )  # fmt: skip
    parser.add_argument(
        "--compute", type=_measured, default=0.0, metavar="measured|FACTOR",
        help="count the processor time of the script's own code, times a factor: what is "
        "predicted then depends on this machine, and differs from run to run",
    )  # fmt: skip
    parser.add_argument(
        "--fault", action="append", default=[], metavar="FAULT",
        help="such as 'SlowDown(3, factor=2)' or 'Delay(0.01, seconds=1e-3)', see "
        "relaxmpi.faults; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--step", metavar="TEXT",
        help="a step ends with the call whose description has this text (default: the call that "
        "is made most often)",
    )  # fmt: skip
    parser.add_argument(
        "--all-output", action="store_true", help="show what all ranks print, with their numbers"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a timeline for https://ui.perfetto.dev"
    )
    parser.set_defaults(arguments=[])


def _fault(text: str) -> Any:
    """Make a fault of its text: a name and plain numbers, nothing that runs."""
    from relaxmpi.primitives.simulation import faults

    kinds: dict[str, Callable[..., Any]] = {
        name: getattr(faults, name)
        for name in ("Delay", "Drop", "Duplicate", "Kill", "Pause", "Reorder", "SlowDown")
    }
    example = "write it like 'Delay(0.01, seconds=1e-3)'"
    try:
        call = ast.parse(text, mode="eval").body
        if isinstance(call, ast.Name) and call.id in kinds:
            raise ValueError(f"{_takes(call.id, kinds)}; {example}")
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            raise ValueError(example)
        if call.func.id not in kinds:
            raise ValueError(f"there are {', '.join(kinds)}")
        values = [ast.literal_eval(value) for value in call.args]
        named = {word.arg or "**": ast.literal_eval(word.value) for word in call.keywords}
        try:
            return kinds[call.func.id](*values, **named)
        except TypeError:  # it names the constructor, and not what there is
            raise ValueError(_takes(call.func.id, kinds)) from None
    except SyntaxError:
        raise ValueError(f"--fault {text!r}: {example}") from None
    except ValueError as error:
        raise ValueError(f"--fault {text!r}: {error}") from None


def _takes(name: str, kinds: dict[str, Callable[..., Any]]) -> str:
    return f"{name} takes {', '.join(inspect.signature(kinds[name]).parameters)}"


def _world(options: argparse.Namespace) -> SimulatedWorld:
    from relaxmpi.primitives.simulation.network import Network
    from relaxmpi.primitives.simulation.simulated import SimulatedWorld

    network = Network.ethernet(
        options.bandwidth,
        options.latency,
        local_latency=options.local_latency,
        local_bandwidth=options.local_bandwidth / 8,
        scale=options.scale,
    )
    return SimulatedWorld(
        options.ranks,
        network=network,
        faults=[_fault(text) for text in options.fault],
        seed=options.seed,
        ranks_per_node=options.ranks_per_node,
        jitter=options.jitter,
        watchdog=_WATCHDOG,
    )


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status: the script's, or 2 for wrong options."""
    from relaxmpi.forecast import forecast
    from relaxmpi.primitives.timeline import write_timeline
    from relaxmpi.script import run_script

    try:
        if not options.script.is_file():
            raise FileNotFoundError(
                f"there is no file {options.script}: give the path of a Python script"
            )
        world = _world(options)
        if options.trace is not None and not options.trace.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {options.trace.parent}")
        done = run_script(
            options.script,
            options.arguments,
            world,
            everybody=options.all_output,
            measured=options.compute,
            messages=options.trace is not None,
        )
    except SyntaxError:
        traceback.print_exc(limit=0)
        return 1
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError) as error:
        print(f"relaxmpi simulate: {error}", file=sys.stderr)
        return 2
    if options.trace is not None:
        recordings = {
            recorder.index: (recorder.since((0, 0, 0, 0), 0.0), 0.0) for recorder in done.recorders
        }
        write_timeline(options.trace, recordings)
    if done.failure is not None:
        print(f"relaxmpi simulate: {done.failure.text}", end="", file=sys.stderr)
    else:
        print()
        print(forecast(done.recorders, done.clocks, world, options.step, options.compute > 0))
    if done.hidden:
        print(f"(other ranks printed {done.hidden} lines: --all-output shows them)")
    if options.trace is not None:
        print(f"timeline in {options.trace}: open it in https://ui.perfetto.dev")
    return done.status
