"""Neighbour verbs: one source for blocking calls, started calls and parts of primitives."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from relaxmpi.primitives.agreement import nothing
from relaxmpi.primitives.calls import Call
from relaxmpi.primitives.errors import MismatchError
from relaxmpi.primitives.primitive import Primitive
from relaxmpi.primitives.routes import Route, checked_step, look_at, route_of
from relaxmpi.primitives.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Hashable

    from relaxmpi.primitives.comm import Comm
    from relaxmpi.primitives.devices import Device
    from relaxmpi.primitives.edges import Exchange
    from relaxmpi.primitives.work import Flow, Work

__all__ = ["EdgePlan", "EdgeVerb", "Move", "agree_on"]

P = ParamSpec("P")
T = TypeVar("T")


class Move:
    """A call of a neighbour verb whose arguments were checked.

    Attributes:
        what: What the two ends of an edge must agree on, besides the step.
        device: Where the numbers live.
        post: Posts all messages of a call and returns the flow of the rest.
        alone: Makes the result on one rank.
    """

    __slots__ = ("alone", "device", "post", "what")

    def __init__(
        self,
        what: tuple[Hashable, ...],
        device: Device,
        post: Callable[[Exchange, Route], Flow[Any]],
        alone: Callable[[], Any],
    ) -> None:
        self.what, self.device, self.post, self.alone = what, device, post, alone


class EdgePlan:
    """A call of a neighbour verb.

    Attributes:
        verb: Its name.
        check: Checks the arguments; raises TypeError or ValueError.
        topology: Who exchanges with whom; None where `route` says it.
        step: Of the topology.
        route: Of a pair.
        doubly: Whether rows of W must sum to 1.
    """

    __slots__ = ("check", "doubly", "route", "step", "topology", "verb")

    def __init__(
        self,
        verb: str,
        check: Callable[[], Move],
        topology: Any = None,
        step: int | None = None,
        route: Route | None = None,
        *,
        doubly: bool = False,
    ) -> None:
        self.verb, self.check, self.topology, self.step = verb, check, topology, step
        self.route, self.doubly = route, doubly


class EdgeVerb(Primitive[P, T]):
    """A verb whose ranks meet only along the edges of a topology."""

    def __init__(self, plan: Callable[Concatenate[Comm, P], EdgePlan]) -> None:
        self._plan = plan
        update_wrapper(self, plan)

    def flow(self, comm: Comm, /, *args: P.args, **kwargs: P.kwargs) -> Flow[T]:
        """Return the flow, for `yield from` inside another primitive."""
        plan = self._plan(comm, *args, **kwargs)
        move, refusal = _checked(plan)
        if _is_new(comm, plan.topology):
            yield from comm.agreed(_first_use(comm, plan, refusal), nothing())
            _learn(comm, plan)
        route = _route(comm, plan, move, refusal)
        if comm.size == 1:
            return move.alone()
        call = Call(move.what)
        exchange = comm.edges.exchange(call, comm.transport(move.device), plan.step)
        try:
            return (yield from move.post(exchange, route))
        except MismatchError as error:
            error.agreed = False  # ranks without a share in this edge have gone on
            raise

    def _submit(self, comm: Comm, *args: P.args, **kwargs: P.kwargs) -> Work[T]:
        plan = self._plan(comm, *args, **kwargs)
        comm.usable(Call((plan.verb,)))
        move, refusal = _checked(plan)
        if _is_new(comm, plan.topology):
            comm.submit(_first_use(comm, plan, refusal), nothing()).wait()
            _learn(comm, plan)
        route = _route(comm, plan, move, refusal)
        return comm.exchange(move, route, plan.step)


def agree_on(comm: Comm, topology: Topology, step: int | None = None) -> None:
    """Have all ranks agree on a topology ahead of its first use, which then need not wait."""
    if _is_new(comm, topology):
        plan = EdgePlan("topology", lambda: Move((), None, None, None), topology, step)  # type: ignore[arg-type]
        _move, refusal = _checked(plan)
        comm.submit(_first_use(comm, plan, refusal), nothing()).wait()
        _learn(comm, plan)


def _checked(plan: EdgePlan) -> tuple[Move | None, Exception | None]:
    try:
        if plan.route is None:
            if not isinstance(plan.topology, Topology):
                raise TypeError(
                    f"topology must be a Topology such as Ring(), not {plan.topology!r}"
                )
            checked_step(plan.topology, plan.step)
        return plan.check(), None
    except Exception as error:
        return None, error


def _is_new(comm: Comm, topology: Any) -> bool:
    """Whether the ranks have yet to agree on it; equal on all ranks that have called alike."""
    if comm.size == 1 or topology is None:
        return False
    known = comm.edges.known
    return topology not in known if isinstance(topology, Topology) else not known


def _first_use(comm: Comm, plan: EdgePlan, refusal: Exception | None) -> Call:
    topology = plan.topology
    if refusal is None:
        try:
            comm.edges.learning = look_at(topology, comm.rank, comm.size, plan.step)
        except Exception as error:
            refusal = error
    return Call((f"first {plan.verb} over", repr(topology)), refusal)


def _learn(comm: Comm, plan: EdgePlan) -> None:
    comm.edges.known[plan.topology] = comm.edges.learning


def _route(comm: Comm, plan: EdgePlan, move: Move | None, refusal: Exception | None) -> Route:
    """Return the route of a call without a refusal; with one, tell the neighbours and raise it."""
    route = plan.route
    if route is None and comm.size == 1:
        route = Route({}, {}, 1.0)
    if route is None and isinstance(plan.topology, Topology) and plan.topology in comm.edges.known:
        known = comm.edges.known[plan.topology]
        if plan.doubly and not known.doubly and refusal is None:
            refusal = ValueError(
                f"{plan.topology!r} gives each rank more or less than it takes, so averages would "
                "be biased: use push_sum, whose weight w corrects that"
            )
        if not plan.topology.varies or isinstance(plan.step, int):
            route = route_of(comm.edges, plan.topology, plan.step, comm.rank, comm.size)
    if refusal is None:
        assert route is not None and move is not None
        return route
    if route is not None and comm.size > 1:
        comm.edges.skip(route, f"{plan.verb}, refused: {refusal}")
    raise refusal
