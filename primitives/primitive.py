"""`@primitive`: one source for blocking calls, started calls and parts of other primitives."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import TYPE_CHECKING, Concatenate, Generic, ParamSpec, TypeVar

from relaxmpi.primitives.agreement import nothing
from relaxmpi.primitives.calls import Call
from relaxmpi.primitives.door import Door
from relaxmpi.primitives.work import Flow, Work

if TYPE_CHECKING:
    from relaxmpi.primitives.comm import Comm

__all__ = ["Primitive", "Verb", "primitive"]

P = ParamSpec("P")
T = TypeVar("T")


class Plan(Generic[T]):
    """A validated call of a verb.

    Attributes:
        call: What the ranks must agree on.
        flow: What carries it out.
        take_back: Undoes the first step of the flow, where that may come before the agreement
            because it changes nothing that anybody looks at unasked; None where it may not.
    """

    __slots__ = ("_flow", "call", "take_back")

    def __init__(
        self, call: Call, flow: Flow[T], take_back: Callable[[], None] | None = None
    ) -> None:
        self.call, self._flow, self.take_back = call, flow, take_back

    @property
    def flow(self) -> Flow[T]:
        """See above."""
        return self._flow


class Primitive(Generic[P, T]):
    """A function of a Comm that returns a flow, callable in three ways.

    `p(comm, ...)` blocks and returns the result, `p.start(comm, ...)` returns a `Work`, and
    `yield from p.flow(comm, ...)` is a part of another primitive.
    """

    __name__: str

    def __init__(self, build: Callable[Concatenate[Comm, P], Flow[T]]) -> None:
        self._build = build
        update_wrapper(self, build)

    def __call__(self, comm: Comm, /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Block until done and return the result."""
        with door_of(comm, self.__name__):
            return comm.run(self._checked(comm, *args, **kwargs))

    def start(self, comm: Comm, /, *args: P.args, **kwargs: P.kwargs) -> Work[T]:
        """Start the call and return at once; the buffers belong to the Work until it is done."""
        with door_of(comm, self.__name__):
            plan = self._checked(comm, *args, **kwargs)
            return comm.submit(plan.call, plan.flow)

    def flow(self, comm: Comm, /, *args: P.args, **kwargs: P.kwargs) -> Flow[T]:
        """Return the flow, for `yield from` inside another primitive."""
        return self._build(comm, *args, **kwargs)

    def _checked(self, comm: Comm, *args: P.args, **kwargs: P.kwargs) -> Plan[T]:
        try:
            return Plan(Call((self.__name__,)), self._build(comm, *args, **kwargs))
        except Exception as error:
            return Plan(Call((self.__name__,), error), nothing())


class Verb(Primitive[P, T]):
    """A primitive of the library, whose ranks also agree on the arguments."""

    def __init__(self, plan: Callable[Concatenate[Comm, P], Plan[T]]) -> None:
        self._plan = plan
        update_wrapper(self, plan)

    def flow(self, comm: Comm, /, *args: P.args, **kwargs: P.kwargs) -> Flow[T]:
        """Return the flow, for `yield from` inside another primitive."""
        plan = self._checked(comm, *args, **kwargs)
        return comm.agreed(plan.call, plan.flow)

    def _checked(self, comm: Comm, *args: P.args, **kwargs: P.kwargs) -> Plan[T]:
        try:
            return self._plan(comm, *args, **kwargs)
        except Exception as error:
            return Plan(Call((self.__name__,), error), nothing())


def primitive(build: Callable[Concatenate[Comm, P], Flow[T]]) -> Primitive[P, T]:
    """Make a primitive of a plain function that checks, reads its inputs and returns a flow.

    Write a function, not a generator function: what it does before it returns the generator
    happens when it is called, on every rank, before the peers have begun.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> @rx.primitive
        ... def two_means(comm, x, y):
        ...     def flow():
        ...         yield from rx.allreduce.flow(comm, x, op=rx.MEAN)
        ...         yield from rx.allreduce.flow(comm, y, op=rx.MEAN)
        ...         return x, y
        ...     return flow()
        >>> with rx.Comm.world() as comm:
        ...     two_means(comm, np.ones(1), np.zeros(1))
        (array([1.]), array([0.]))
    """
    return Primitive(build)


def door_of(comm: Comm, verb: str) -> Door:
    """Enter a Comm by its door; TypeError where it is none."""
    try:
        return comm.door(verb)
    except AttributeError:
        raise TypeError(
            f"the first argument of {verb} must be a Comm, such as rx.Comm.world(), not "
            f"{type(comm).__name__}"
        ) from None
