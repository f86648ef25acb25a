"""What a simulated network costs, in numbers that a ping-pong can measure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relaxmpi.primitives.codecs import Codec
    from relaxmpi.primitives.comm import Comm
    from relaxmpi.primitives.feedback import ErrorFeedback

__all__ = ["BATCH", "Network"]

# Bytes that stacks, cards and switches hand on as a whole, about: the longest frame that a card
# cuts up, or joins, holds twice as many.
BATCH = 32 * 1024


@dataclass(frozen=True)
class Network:
    """Hosts with one full-duplex link each to a switch that never blocks.

    A message of s bytes between idle hosts arrives after latency + s / bandwidth + the delay of
    batches, besides the processors' costs. Its first byte takes the link up as soon as the link
    is free, and the link down `latency` later: messages of one host leave one after the other,
    messages to one host (incast) arrive one after the other, and the two directions do not touch.
    Ranks of one node share its link; what they say to each other goes through a port of each rank
    instead, with the local latency and bandwidth. Buffers in the switch are endless.

    A message costs processors something by itself, and between nodes something for each byte: a
    batch of 32 KiB is worked on while another is on the wire.

    Agreements and notices are small and cost latency, not bandwidth. An agreement climbs a
    binomial tree to rank 0 and comes down again, as in MPI: with one rank a host, rank 0 knows
    up to ceil(log2 n) latencies after the last rank has come, the others up to as many later.

    Attributes:
        latency: Seconds from a host to another, one way.
        bandwidth: Bytes per second of each host's link, in each direction.
        down: Bytes per second of the link down to a host, where it differs; 0: `bandwidth`.
        local_latency: Seconds between ranks of one host.
        local_bandwidth: Bytes per second between ranks of one host.
        send_cost: Seconds of the sender's processor for each MPI message.
        receive_cost: Seconds of the receiver's processor for each MPI message.
        send_byte: Seconds of the sender's processor for each byte between nodes, besides.
        receive_byte: Seconds of the receiver's processor for each byte between nodes, besides.
        batch_delay: Seconds by which a message of 32 KiB or more between nodes is later than
            latency and bandwidth say, because bytes are handed on in batches, not one by one;
            shorter messages in proportion. It keeps no link and no processor busy.
        agree_cost: Seconds of processors for each hop of an agreement.
        call_cost: Seconds of the processor for the code of a verb that moves numbers, in each
            call: besides what its messages, its agreement and its arithmetic cost.
        packet: Payload bytes of a packet.
        overhead: Bytes that each packet carries besides: Ethernet, IP and TCP.
        eager: Bytes of the longest MPI message that travels while both ranks compute; longer
            ones wait until both are in a call, or have `background()`.
        segment: Bytes of the MPI messages into which buffers are cut between nodes, unless
            `RELAXMPI_SEGMENT` says another number. The defaults of both are those of
            `Comm.world()` on Open MPI; elsewhere they are 64 and 32 KiB.
        scale: A small array stands for one that is this many times longer: time is counted,
            and messages are cut, for `scale` times the bytes.
        work: Seconds of the processor for the arithmetic of verbs, a call and a number: for
            "reduce" (the sum of two numbers), "copy" and "divide", and for the codecs, such as
            f"{codec.describe()}.encode", "encode_feedback", "encode_difference", "decode",
            "decode_add" and "decode_follow". What is not named takes no time.

    Raises:
        ValueError: A number is negative, or a rate is not above zero.

    Example:
        >>> net = Network(latency=1e-3, bandwidth=1e6)
        >>> net.latency + net.wire_bytes(5000) / net.bandwidth
        0.006
        >>> Network.ethernet(10e9, latency=20e-6).bandwidth
        1250000000.0
    """

    latency: float = 50e-6
    bandwidth: float = 1.25e9
    down: float = 0.0
    local_latency: float = 1e-6
    local_bandwidth: float = 5e9
    send_cost: float = 1e-6
    receive_cost: float = 1e-6
    send_byte: float = 0.0
    receive_byte: float = 0.0
    batch_delay: float = 0.0
    agree_cost: float = 2e-6
    call_cost: float = 0.0
    packet: int = 1448
    overhead: int = 0
    eager: int = 1024 * 1024
    segment: int = 512 * 1024
    scale: float = 1.0
    work: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        positive = {"bandwidth", "local_bandwidth", "packet", "segment", "scale"}
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "work"}
        for name, prices in self.work.items():
            numbers |= {f"work[{name!r}][{place}]": price for place, price in enumerate(prices)}
        for name, value in numbers.items():
            if not isinstance(value, (int, float)) or not (
                0 < value < math.inf if name in positive else value >= 0
            ):
                kind = "above zero" if name in positive else "zero or more"
                raise ValueError(f"{name} of a Network must be {kind}, not {value!r}")

    @classmethod
    def ethernet(cls, bits_per_second: float, latency: float = 50e-6, **others: float) -> Network:
        """Return a network of this line rate, with the overhead of TCP over Ethernet.

        Args:
            bits_per_second: For instance 10e9.
            latency: Seconds, one way.
            others: Other fields of Network.
        """
        values = {"overhead": 90, **others}  # preamble and gap 20, Ethernet 18, IP 20, TCP 32
        return cls(latency=latency, bandwidth=bits_per_second / 8, **values)  # type: ignore[arg-type]

    @classmethod
    def from_measurement(cls, comm: Comm, codecs: Sequence[Codec | ErrorFeedback] = ()) -> Network:
        """Fit a network to the links between the ranks of a Comm; collective, 2 s to 8 s.

        Ranks of different nodes, and ranks of one node, work in pairs, all pairs at once, because
        ranks that wait would take the cores from those that work. Each number is the median over
        the pairs and over several rounds:

        - send_cost and receive_cost: what a word of 8 bytes takes two ranks longer that send each
          other 24 of them, in the ratio of the processors' times to send 24, and to receive them
          when they have all arrived: with all at work at once, as in verbs;
        - send_byte and receive_byte, between nodes: what 32 KiB take it longer, by their bytes;
        - bandwidth: (S - S/4) / (T(S) - T(S/4)), T the time in which two ranks send each other S
          bytes, S what takes about 0.15 s. It is that of payloads, so `overhead` is 0;
        - latency: half a word's way there and back, less both costs and 8 bytes / bandwidth;
        - batch_delay, between nodes: the same of 32 KiB, less the latency;
        - agree_cost: from barriers in a row, each of which takes whole trees;
        - work: from calls on 1,024 numbers, and on a million each that no cache holds, on all
          ranks at once;
        - call_cost: what short all-reduces in a row take longer than in a simulated world on this
          network; on no more than 16 ranks.

        What is not measured keeps its default: the local values where no node has two ranks. On
        one node the values between nodes are the local ones. `segment` is what the Comm uses, and
        `eager` twice that; `packet` and `down` are not measured, and neither is how TCP fares
        when buffers of the switch overflow.

        Args:
            comm: A Comm of two ranks or more, with nothing else under way on the machines.
            codecs: Whose arithmetic is timed, too; an ErrorFeedback for its codec with feedback.

        Returns:
            The same on all ranks; numbers have 4 digits, and the repr can be pasted into code.

        Raises:
            ValueError: There is one rank only.

        Example:
            >>> import relaxmpi as rx
            >>> def program():
            ...     with rx.Comm.world() as comm:
            ...         return rx.Network.from_measurement(comm)
            >>> network = rx.Network(latency=1e-3, bandwidth=1e8)
            >>> found = rx.SimulatedWorld(2, network=network).run(program)[0]
            >>> found.latency, found.bandwidth
            (0.001, 100000000.0)
        """
        from relaxmpi.primitives.simulation.measurement import measure

        return measure(comm, codecs)

    @property
    def down_bandwidth(self) -> float:
        """Bytes per second of the link down to a host."""
        return self.down or self.bandwidth

    def wire_bytes(self, size: float) -> float:
        """Return the bytes on a link for a message of `size` bytes, which is scaled already."""
        return size + math.ceil(size / self.packet) * self.overhead if self.overhead else size
