"""``relaxmpi doctor``: what is wrong with this installation, and what to do about it."""

import argparse
import dataclasses
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Sequence

from relaxmpi import checks_machine, checks_mpi, checks_network
from relaxmpi.findings import Finding, bad, ok, warn

__all__ = ["CHECKS", "add_options", "agreement", "examine", "layout", "report", "run"]

CHECKS: tuple[Callable[[], Finding], ...] = (
    checks_machine.check_python,
    checks_machine.check_packages,
    checks_mpi.check_library,
    checks_mpi.check_threads,
    checks_mpi.check_wheels,
    checks_mpi.check_launcher,
    checks_mpi.check_job,
    checks_mpi.check_size,
    checks_mpi.check_root,
    checks_mpi.check_slots,
    checks_mpi.check_fault_tolerance,
    checks_machine.check_interfaces,
    checks_machine.check_thread_counts,
    checks_machine.check_kernel_cache,
    checks_machine.check_cuda_packages,
    checks_machine.check_cuda_driver,
    checks_machine.check_settings,
    checks_machine.check_transport,
)


def examine(checks: Sequence[Callable[[], Finding]] = CHECKS) -> list[Finding]:
    """Run the checks; one that fails itself is a finding too."""
    findings = []
    for check in checks:
        try:
            findings.append(check())
        except Exception as error:
            name = check.__name__.removeprefix("check_").replace("_", " ")
            what = f"cannot be checked: {type(error).__name__}: {error}"
            findings.append(warn(name, what, "please report this"))
    return findings


def layout(hosts: Sequence[str]) -> Finding:
    """Describe the nodes of a job.

    Args:
        hosts: The host name of each rank.
    """
    ranks = Counter(hosts)
    counts = sorted(set(ranks.values()))
    text = f"{', '.join(ranks)}; {'/'.join(map(str, counts))} ranks on each of {len(ranks)}"
    if len(counts) > 1:
        return warn("nodes", text, "give every host the same number of ranks: --map-by ppr:N:node")
    return ok("nodes", text)


def sharing(copies: Sequence[int | None]) -> Finding:
    """Say whether the ranks of a host talk through memory that they share, and read each other's.

    Args:
        copies: Of each rank; see `checks_mpi.copies`.
    """
    if 0 in copies:
        return warn(
            "shared memory",
            f"rank {copies.index(0)} and others of its host send each other messages",
            "unset RELAXMPI_SHARED_MEMORY; ranks in containers of their own need one space of "
            "process numbers (docker run --pid) and one user, to see each other in /proc; "
            "only x86-64 has it",
        )
    if 2 in copies:
        return warn(
            "shared memory",
            f"between the ranks of a host; rank {copies.index(2)} may not read the memory of the "
            "others, so that long all-reduces take two copies",
            "unset RELAXMPI_SINGLE_COPY; sysctl kernel.yama.ptrace_scope=0; docker run "
            "--cap-add=SYS_PTRACE",
        )
    if 1 in copies:
        return ok("shared memory", "between the ranks of a host, which read each other's memory")
    return ok("shared memory", "every rank has a host to itself")


def agreement(versions: Sequence[dict[str, str]]) -> Finding:
    """Say whether all ranks run the same versions.

    Args:
        versions: Package versions of each rank.
    """
    names = sorted({name for found in versions for name in found})
    differing = [name for name in names if len({found.get(name) for found in versions}) > 1]
    if not differing:
        return ok("versions", f"the same on all {len(versions)} ranks")
    text = "; ".join(
        f"{name}: " + ", ".join(f"rank {r} {v.get(name, 'none')}" for r, v in enumerate(versions))
        for name in differing
    )
    return bad("versions", text, "install the same versions on every host")


def report(findings: Sequence[Finding]) -> str:
    """Return the findings as text, a line each, with the advice below its line."""
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<4}  {finding.subject:<{width}}  {finding.text}")
        if finding.advice:
            lines.append(f"{'':<{width + 6}}  -> {finding.advice}")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.description = (
        "Check this installation; under mpirun also the job. The exit status is 1 if anything "
        "is bad."
    )
    parser.add_argument(
        "--network",
        action="store_true",
        help="instead, measure the links between the ranks of this job, for SimulatedWorld",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _is_first() -> bool:
    """Say whether the launcher calls this rank 0, whatever the library believes."""
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
    return next((os.environ[name] for name in names if name in os.environ), "0") == "0"


def _show(findings: Sequence[Finding], as_json: bool) -> int:
    """Print the findings and return the exit status that they ask for."""
    shown = json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2)
    print(shown if as_json else report(findings))
    sys.stdout.flush()
    return int(any(finding.status == "bad" for finding in findings))


def _run_network(options: argparse.Namespace) -> int:
    """Measure the links of the job; every rank takes part, the first one prints."""
    from relaxmpi.primitives import Comm

    with Comm.world() as comm:
        hosts = [platform.node()] if comm.size == 1 else comm.mpi.allgather(platform.node())
        found = checks_network.check_network(comm, hosts)
        if comm.rank == 0:
            return _show(found if comm.size == 1 else [layout(hosts), *found], options.json)
    return int(any(finding.status == "bad" for finding in found))


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    if options.network:
        return _run_network(options)
    world = checks_mpi.world()
    about_job = []
    if world is not None and world.size > 1:
        hosts = world.gather(platform.node())
        shared = world.gather(checks_mpi.copies())
        found = world.gather(checks_machine.versions())
        if world.rank == 0:
            about_job = [layout(hosts), sharing(shared), agreement(found)]
    status = 0
    if _is_first():
        status = _show(examine() + about_job, options.json)
    if world is not None and world.size > 1:
        status = world.bcast(status)
    return status
