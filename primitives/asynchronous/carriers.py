"""How the numbers of asynchronous push-sum travel: as shares, as sums, or as coded differences."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from relaxmpi.primitives.asynchronous.edges import InEdge, OutEdge
from relaxmpi.primitives.codecs import Codec, Key
from relaxmpi.primitives.devices import Device
from relaxmpi.primitives.ops import Op

__all__ = ["Carrier", "Differences", "Share", "Shares", "Sums"]


class Share(NamedTuple):
    """What is given on one edge in one step.

    Attributes:
        p: The share of x that the topology says.
        w: The weight that goes with it.
        held: The weight of x now.
        keep: With the last one of a step: the part of x that is left; None before.
    """

    p: float
    w: float
    held: float
    keep: float | None


class Carrier(Protocol):
    """How numbers travel on an edge.

    Attributes:
        form: Its number in headers.
        nbytes: Bytes of one message behind the header.
        replaces: Whether a newer message makes older ones superfluous.
    """

    form: int
    nbytes: int
    replaces: bool

    def part(self, p: float) -> float:
        """Return which part of x and w is given where the topology says p."""

    def give(self, edge: OutEdge, x: Any, share: Share, payload: Any) -> None:
        """Put a share of `x` on an edge."""

    def take(self, edge: InEdge, payload: Any, into: Any, w: float) -> None:
        """Add to `into` what a message brings, with the weight that its header says."""

    def level(self, edge: OutEdge | InEdge) -> None:
        """Begin anew on an edge on which nothing is under way."""

    def save(self, edge: OutEdge | InEdge) -> Any:
        """Return what must be saved of an edge on which nothing is under way."""

    def load(self, edge: OutEdge | InEdge, saved: Any) -> None:
        """Put back what `save` has returned."""


class Shares:
    """The shares p x themselves, for mailboxes on which every message arrives, once, in order."""

    form, replaces = 1, False

    def __init__(self, device: Device, x: Any) -> None:
        self._device, self._dtype, self.nbytes = device, x.dtype, x.nbytes

    def part(self, p: float) -> float:
        """See `Carrier`."""
        return p

    def give(self, edge: OutEdge, x: Any, share: Share, payload: Any) -> None:
        """See `Carrier`."""
        kernels, numbers = self._device.kernels, payload.view(self._dtype)
        if share.keep is None:
            kernels.scaled(x, share.p, numbers)
        else:
            kernels.share(x, share.keep, share.p, numbers)

    def take(self, edge: InEdge, payload: Any, into: Any, w: float) -> None:
        """See `Carrier`."""
        self._device.reduce(Op.SUM, into, payload.view(self._dtype), into)

    def level(self, edge: OutEdge | InEdge) -> None:
        """There is nothing to forget."""

    def save(self, edge: OutEdge | InEdge) -> None:
        """See `Carrier`: nothing."""

    def load(self, edge: OutEdge | InEdge, saved: None) -> None:
        """See `Carrier`: nothing."""


class Sums:
    """Sums of all shares so far, phi, in float64: robust push-sum.

    The receiver adds phi - rho and remembers rho = phi (Spiridonoff, Olshevsky and Paschalidis
    2020), so a newer message replaces an older one, and lost or repeated ones cost nothing. The
    difference of two sums over k shares is exact to k ulps of float64.
    """

    form, replaces = 2, True

    def __init__(self, x: Any) -> None:
        self._count, self._dtype, self.nbytes = len(x), x.dtype, 8 * len(x)

    def part(self, p: float) -> float:
        """See `Carrier`."""
        return p

    def give(self, edge: OutEdge, x: Any, share: Share, payload: Any) -> None:
        """See `Carrier`."""
        if edge.phi is None:
            edge.phi = np.zeros(self._count)
        edge.phi += x * self._dtype.type(share.p)
        if share.keep is not None:
            x *= self._dtype.type(share.keep)
        payload.view(np.float64)[:] = edge.phi

    def take(self, edge: InEdge, payload: Any, into: Any, w: float) -> None:
        """See `Carrier`."""
        phi = payload.view(np.float64)
        if edge.rho is None:
            edge.rho = np.zeros(self._count)
        np.subtract(phi, edge.rho, out=edge.rho)
        into += edge.rho.astype(self._dtype, copy=False)
        edge.rho[:] = phi

    def level(self, edge: OutEdge | InEdge) -> None:
        """See `Carrier`: what was given and what was taken are equal now."""
        if isinstance(edge, OutEdge):
            edge.phi = None
        else:
            edge.rho = None

    def save(self, edge: OutEdge | InEdge) -> None:
        """See `Carrier`: nothing."""

    def load(self, edge: OutEdge | InEdge, saved: None) -> None:
        """See `Carrier`: nothing."""


class Differences:
    """Coded differences to a replica h of z = x / w that both ends of an edge keep.

    q = C(z - h), h += q at both ends; what is given is the weight gamma p w and, of x, that
    weight times h: the sender takes away the very number that the receiver adds, so the mass is
    exact whatever the codec does. C sees only how far the replica lags behind, as in CHOCO-SGD
    (Koloskova, Stich and Jaggi 2019); and the replica is one of z, not of x, because the weights
    of ranks that run freely go up and down, and x with them. Every message is needed, in order.
    """

    form, replaces = 3, False

    def __init__(self, device: Device, x: Any, codec: Codec, gamma: float, key: Key) -> None:
        self._kernels, self._codec, self._gamma, self._key = device.kernels, codec, gamma, key
        self._count, self._dtype = len(x), x.dtype
        self.nbytes = codec.nbytes(len(x), x.dtype)
        self._change = np.empty_like(x)

    def part(self, p: float) -> float:
        """See `Carrier`."""
        return self._gamma * p

    def give(self, edge: OutEdge, x: Any, share: Share, payload: Any) -> None:
        """See `Carrier`."""
        if edge.phi is None:
            edge.phi = np.zeros(self._count, self._dtype)
        self._kernels.pair(x, 1.0 / share.held, edge.phi, -1.0, self._change)
        key = self._key._replace(step=edge.step, site=edge.peer % 256)
        self._codec.encode(self._change, payload, key=key)
        self._follow(edge.phi, payload)
        self._kernels.mix(x, edge.phi, -share.w, x)

    def _follow(self, replica: Any, payload: Any) -> None:
        self._codec.decode(payload, self._change)
        self._kernels.follow(replica, self._change)

    def take(self, edge: InEdge, payload: Any, into: Any, w: float) -> None:
        """See `Carrier`."""
        if edge.rho is None:
            edge.rho = np.zeros(self._count, self._dtype)
        self._follow(edge.rho, payload)
        self._kernels.mix(into, edge.rho, w, into)

    def level(self, edge: OutEdge | InEdge) -> None:
        """The replicas at both ends are equal, and stay."""

    def save(self, edge: OutEdge | InEdge) -> Any:
        """See `Carrier`: the replica."""
        replica = edge.phi if isinstance(edge, OutEdge) else edge.rho
        return None if replica is None else replica.copy()

    def load(self, edge: OutEdge | InEdge, saved: Any) -> None:
        """See `Carrier`."""
        replica = None if saved is None else saved.copy()
        if isinstance(edge, OutEdge):
            edge.phi = replica
        else:
            edge.rho = replica
