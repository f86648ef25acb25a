"""How the numbers of asynchronous push-sum travel: as shares, as sums, or as coded differences."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from relaxmpi.primitives.async_edges import InEdge, OutEdge
from relaxmpi.primitives.codecs import Codec, Key
from relaxmpi.primitives.devices import Device
from relaxmpi.primitives.ops import Op

__all__ = ["Carrier", "Differences", "Shares", "Sums"]


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

    def give(self, edge: OutEdge, x: Any, p: float, payload: Any, keep: float | None) -> float:
        """Put the share p of `x` on an edge; return the part of the weight that goes with it.

        With the last one of a step, `keep` is the part of `x` that is left.
        """

    def again(self, edge: OutEdge, payload: Any) -> None:
        """Fill the payload of the edge's newest message once more."""

    def take(self, edge: InEdge, payload: Any, into: Any, p: float) -> None:
        """Add to `into` what a message brings; `p` is the share that its sender gave."""

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

    def give(self, edge: OutEdge, x: Any, p: float, payload: Any, keep: float | None) -> float:
        """See `Carrier`."""
        kernels, numbers = self._device.kernels, payload.view(self._dtype)
        if keep is None:
            kernels.scaled(x, p, numbers)
        else:
            kernels.share(x, keep, p, numbers)
        return p

    def again(self, edge: OutEdge, payload: Any) -> None:
        """Nothing is ever sent again."""
        raise NotImplementedError

    def take(self, edge: InEdge, payload: Any, into: Any, p: float) -> None:
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

    def give(self, edge: OutEdge, x: Any, p: float, payload: Any, keep: float | None) -> float:
        """See `Carrier`."""
        if edge.phi is None:
            edge.phi = np.zeros(self._count)
        edge.phi += x * self._dtype.type(p)
        if keep is not None:
            x *= self._dtype.type(keep)
        self.again(edge, payload)
        return p

    def again(self, edge: OutEdge, payload: Any) -> None:
        """See `Carrier`."""
        payload.view(np.float64)[:] = edge.phi

    def take(self, edge: InEdge, payload: Any, into: Any, p: float) -> None:
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
    """Coded differences to a replica of x that both ends of an edge keep.

    q = C(x - h), h += q at both ends, and what is given is gamma p h: the sender takes away the
    very number that the receiver adds, so the mass is exact whatever the codec does, and C never
    sees x itself, only how far the replica lags behind (as in CHOCO-SGD, Koloskova, Stich and
    Jaggi 2019). Every message is needed, in order.
    """

    form, replaces = 3, False

    def __init__(self, device: Device, x: Any, codec: Codec, gamma: float, key: Key) -> None:
        self._kernels, self._codec, self._gamma, self._key = device.kernels, codec, gamma, key
        self._count, self._dtype = len(x), x.dtype
        self.nbytes = codec.nbytes(len(x), x.dtype)
        self._change = np.empty_like(x)

    def give(self, edge: OutEdge, x: Any, p: float, payload: Any, keep: float | None) -> float:
        """See `Carrier`."""
        if edge.phi is None:
            edge.phi = np.zeros(self._count, self._dtype)
        self._kernels.subtract(x, edge.phi, self._change)
        key = self._key._replace(step=edge.step, site=edge.peer % 256)
        self._codec.encode(self._change, payload, key=key)
        self._follow(edge.phi, payload)
        self._kernels.mix(x, edge.phi, -self._gamma * p, x)
        return self._gamma * p

    def _follow(self, replica: Any, payload: Any) -> None:
        self._codec.decode(payload, self._change)
        self._kernels.follow(replica, self._change)

    def again(self, edge: OutEdge, payload: Any) -> None:
        """The message itself is sent again."""
        raise NotImplementedError

    def take(self, edge: InEdge, payload: Any, into: Any, p: float) -> None:
        """See `Carrier`."""
        if edge.rho is None:
            edge.rho = np.zeros(self._count, self._dtype)
        self._follow(edge.rho, payload)
        self._kernels.mix(into, edge.rho, self._gamma * p, into)

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
