"""Errors raised while ranks communicate; argument errors are TypeError and ValueError."""

__all__ = [
    "BrokenComm",
    "CheckpointError",
    "Deadlock",
    "MismatchError",
    "NonFiniteError",
    "PeerLeft",
    "PeerTimeout",
    "RelaxError",
]


class RelaxError(RuntimeError):
    """Base of the errors of this library."""


class MismatchError(RelaxError):
    """The ranks called different verbs, or the same verb with different arguments.

    Raised on every rank of the communicator before anything moved; outputs are untouched
    and the communicator stays usable. Neighbour verbs raise it on the ranks that share the edge,
    where x may have been scaled and messages of the same call have gone to other ranks. The other
    exception is `attach`, whose ranks have agreed on all
    calls at the start: there each call is compared at its end, and the communicator breaks.
    """

    agreed = True


class PeerTimeout(RelaxError, TimeoutError):
    """A peer was not heard from within the communicator's timeout, which is now broken."""


class PeerLeft(RelaxError):
    """A peer's program ended before it took part in a call that this rank waits in."""


class BrokenComm(RelaxError):
    """The communicator broke in an earlier call and cannot be used any more."""


class NonFiniteError(RelaxError, ArithmeticError):
    """A NaN or an infinity was found where only finite numbers are allowed."""


class Deadlock(RelaxError):
    """Every rank waits for another one and no message is in flight."""


class CheckpointError(RelaxError):
    """A checkpoint cannot be written, seen, trusted or used; raised on every rank."""

    agreed = True
