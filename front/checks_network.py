"""What messages between the ranks of this job cost: ``relaxmpi doctor --network``."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from relaxmpi.findings import Finding, bad, ok, warn

if TYPE_CHECKING:
    from relaxmpi.primitives import Comm, Network

__all__ = ["check_network", "findings"]

_SLOW_INSIDE = 20e-6
_SLOW_BETWEEN = 1e-3
_SLOW_LINK = 0.5e9 / 8
_DEAR = 20e-6
# The kernel doubles what it is asked for, so this much lets one product of bandwidth and delay be
# under way and little more. Measured at 1 Gbit/s and 5 ms one way: 1.0 of the product is too much.
_SHARE_IN_FLIGHT = 0.7
_SHORT = 256 * 1024


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


def _rate(value: float) -> str:
    bits = 8 * value
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def _described(latency: float, bandwidth: float, network: "Network") -> str:
    return (
        f"latency {_seconds(latency)} one way, {_rate(bandwidth)} each way, "
        f"{_seconds(network.send_cost)} to send a message, {_seconds(network.receive_cost)} to "
        "receive it"
    )


def _inside(network: "Network", nodes: Sequence[int]) -> Finding:
    if len(set(nodes)) == len(nodes):
        return ok("within a node", "not measured: one rank on each")
    text = _described(network.local_latency, network.local_bandwidth, network)
    if network.local_latency > _SLOW_INSIDE:
        return warn(
            "within a node",
            text,
            "memory takes a microsecond: are there more ranks and threads than cores, or does MPI "
            "go by TCP? see OMPI_MCA_btl (it needs sm) and the line of the cores in `relaxmpi "
            "doctor`",
        )
    return ok("within a node", text)


def _between(network: "Network", nodes: Sequence[int], hosts: Sequence[str]) -> Finding:
    subject = "between nodes"
    if len(set(nodes)) == 1:
        return ok(
            subject,
            "not measured: all ranks on one node",
            "start the job on several hosts, or emulate some with `relaxmpi lab`",
        )
    text = _described(network.latency, network.bandwidth, network)
    if len(set(hosts)) < len(set(nodes)):
        return warn(
            subject,
            text,
            "these nodes are one machine (RELAXMPI_RANKS_PER_NODE): this is its memory or its "
            "loopback, not a network",
        )
    if network.bandwidth < _SLOW_LINK:
        return warn(
            subject,
            text,
            "less than a gigabit: see the link's speed with `ethtool`, and whether MPI uses the "
            "right interface (OMPI_MCA_btl_tcp_if_include); codecs gain most here",
        )
    if network.latency > _SLOW_BETWEEN:
        return warn(
            subject,
            text,
            "a local network takes 0.1 ms: on a long way small calls cost as much as large ones, "
            "so use few large buckets; on a short way, see whether the cores are all taken",
        )
    return ok(subject, text)


def _in_flight(network: "Network", nodes: Sequence[int]) -> list[Finding]:
    """Say how much TCP should have under way, where that is more than a switch holds anyway."""
    product = 2 * network.latency * network.bandwidth
    if len(set(nodes)) == 1 or product < _SHORT:
        return []
    text = f"a link holds {product / 1e6:.2g} MB in flight, there and back"
    if "OMPI_MCA_btl_tcp_sndbuf" in os.environ:
        return [ok("in flight", f"{text}; OMPI_MCA_btl_tcp_sndbuf is set")]
    size = float(f"{_SHARE_IN_FLIGHT * product:.1g}")
    return [
        warn(
            "in flight",
            text,
            "TCP fills the queues of switches beyond that, and where several ranks send to one, "
            "packets are lost and links idle: if neighbour verbs take longer than their bytes, "
            f"try OMPI_MCA_btl_tcp_sndbuf={size:.0f} (twice that is what the kernel allows). Where "
            "switches hold several messages the opposite helps: 4194304, so that the kernel goes "
            "on sending a whole message while ranks compute",
        )
    ]


def _costs(network: "Network") -> Finding:
    cost = max(network.send_cost, network.receive_cost)
    text = (
        f"each hop of an agreement takes {_seconds(network.agree_cost)} besides the latency, "
        f"a verb's own code {_seconds(network.call_cost)}"
    )
    if cost > _DEAR:
        return warn(
            "processors",
            f"{text}; a message takes {_seconds(cost)}",
            "that is a core's time: start fewer ranks or threads on each host",
        )
    return ok("processors", text)


def _to_paste(network: "Network", nodes: Sequence[int]) -> Finding:
    if len(set(nodes)) > 1:
        return ok("to paste", repr(network))
    return ok(
        "to paste",
        f"Network(local_latency={network.local_latency}, "
        f"local_bandwidth={network.local_bandwidth})",
        "nothing between nodes was measured: what is not named here is a default, so add latency "
        "and bandwidth of the network that you mean",
    )


def findings(network: "Network", nodes: Sequence[int], hosts: Sequence[str]) -> list[Finding]:
    """Describe what was measured.

    Args:
        network: As `Network.from_measurement` returns it.
        nodes: For each rank, the number of its node.
        hosts: For each rank, the name of its host.
    """
    return [
        _inside(network, nodes),
        _between(network, nodes, hosts),
        *_in_flight(network, nodes),
        _costs(network),
        _to_paste(network, nodes),
    ]


def check_network(comm: "Comm", hosts: Sequence[str]) -> list[Finding]:
    """Measure the links of this job; collective."""
    from relaxmpi.primitives import Network  # loads numpy

    if comm.size < 2:
        return [
            bad(
                "network",
                "one rank has no network",
                "mpirun -n 2 python -m relaxmpi doctor --network, or with hosts: relaxmpi lab "
                "--hosts 2 -- python -m relaxmpi doctor --network",
            )
        ]
    return findings(Network.from_measurement(comm), comm.nodes, hosts)
