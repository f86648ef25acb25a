"""Neighbour verbs: one source for blocking calls, started calls and parts of primitives."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from relaxmpi.primitives.agreement import nothing
from relaxmpi.primitives.calls import Call
from relaxmpi.primitives.errors import MismatchError
from relaxmpi.primitives.gossip.routes import Route, checked_step, look_at, route_at
from relaxmpi.primitives.primitive import Primitive, door_of
from relaxmpi.primitives.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Hashable

    from relaxmpi.primitives.comm import Comm
    from relaxmpi.primitives.devices import Flat
    from relaxmpi.primitives.gossip.edges import Exchange
    from relaxmpi.primitives.gossip.routes import Known
    from relaxmpi.primitives.work import Flow, Work

__all__ = ["EdgePlan", "EdgeVerb", "Move", "agree_on"]

_NOWHERE = Route({}, {}, 1.0)

P = ParamSpec("P")
T = TypeVar("T")


class Move:
    """A call of a neighbour verb whose arguments were checked.

    Args:
        what: What the two ends of an edge must agree on, besides the step.
        flat: The caller's numbers.
        target: Where the result goes, which may be `flat`; in push-sum what is kept.
        post: Posts all messages for such numbers, with a place for the result, and returns the
            flow of the rest, whose result is that of push-sum, or nothing.
        give: Makes the verb's result of the flow's.
        w: The weight of push-sum.
    """

    __slots__ = ("_give", "_post", "flat", "target", "w", "what")

    def __init__(
        self,
        what: tuple[Hashable, ...],
        flat: Flat,
        target: Flat,
        post: Callable[[Exchange, Route, Flat, Any], Flow[Any]],
        give: Callable[[Any], Any],
        w: Any = None,
    ) -> None:
        self.what, self.flat, self.target = what, flat, target
        self._post, self._give, self.w = post, give, w

    def post(self, exchange: Exchange, route: Route, part: Flat, goal: Any) -> Flow[Any]:
        """Post all messages; see above."""
        return self._post(exchange, route, part, goal)

    def give(self, result: Any) -> Any:
        """Make the verb's result; see above."""
        return self._give(result)

    def start(self, exchange: Exchange, route: Route) -> Flow[Any]:
        """Post all messages now; the flow returned ends with the verb's result."""
        self.flat.device.enter()
        return self._finish(self.post(exchange, route, self.flat, self.target.data))

    def _finish(self, rest: Flow[Any]) -> Flow[Any]:
        result = yield from rest
        self.flat.device.leave()
        return self.give(result)

    def alone(self) -> Flow[Any]:
        """Return the flow on one rank, where nothing comes from anybody."""
        yield from ()
        flat = self.flat
        if self.w is not None:
            return self.give((flat.device.zeros(len(flat.data), flat.dtype), 0.0))
        if self.target is not flat:
            flat.device.copy(self.target.data, flat.data)
        return self.give(None)


class EdgePlan:
    """A call of a neighbour verb.

    Attributes:
        verb: Its name.
        check: Checks the arguments; raises TypeError or ValueError.
        topology: Who exchanges with whom; None where `route` says it.
        step: Of the topology.
        route: Of a pair.
        doubly: Whether rows of W must sum to 1.
        kind: What calls have in common that need not be checked again; None where that is nothing.
        ready: What came of the check of a call of this kind, and where it goes.
    """

    __slots__ = ("check", "doubly", "kind", "ready", "route", "step", "topology", "verb")

    def __init__(
        self,
        verb: str,
        check: Callable[[], Move],
        topology: Any = None,
        step: int | None = None,
        route: Route | None = None,
        *,
        doubly: bool = False,
        kind: Hashable = None,
        ready: tuple[Move, Route] | None = None,
    ) -> None:
        self.verb, self.check, self.topology, self.step = verb, check, topology, step
        self.route, self.doubly = route, doubly
        self.kind, self.ready = kind, ready


class EdgeVerb(Primitive[P, T]):
    """A verb whose ranks meet only along the edges of a topology."""

    def __init__(self, plan: Callable[Concatenate[Comm, P], EdgePlan]) -> None:
        self._plan = plan
        update_wrapper(self, plan)

    def flow(self, comm: Comm, /, *args: P.args, **kwargs: P.kwargs) -> Flow[T]:
        """Return the flow, for `yield from` inside another primitive."""
        plan = self._plan(comm, *args, **kwargs)
        if plan.ready is None:
            checked = _checked(plan)
            if _is_new(comm, plan.topology):
                yield from comm.agreed(_first_use(comm, plan, checked), nothing())
                _learn(comm, plan)
            move, route = _routed(comm, plan, checked, _known(comm, plan))
        else:
            move, route = plan.ready
        try:
            result: T = yield from comm.meeting(move, route, plan.step)
            return result
        except MismatchError as error:
            error.agreed = False  # ranks without a share in this edge have gone on
            raise

    def __call__(self, comm: Comm, /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Block until done and return the result."""
        with door_of(comm, self.__name__):
            plan = self._plan(comm, *args, **kwargs)
            result: T = comm.exchanged(*_ready(plan, comm), plan.step)
            return result

    def start(self, comm: Comm, /, *args: P.args, **kwargs: P.kwargs) -> Work[T]:
        """Start the call and return at once; the buffers belong to the Work until it is done."""
        with door_of(comm, self.__name__):
            plan = self._plan(comm, *args, **kwargs)
            return comm.exchange(*_ready(plan, comm), plan.step)


def _ready(plan: EdgePlan, comm: Comm) -> tuple[Move, Route]:
    """Return a checked call and where it goes, after an agreement where a topology is new."""
    comm.usable(plan.verb)
    if plan.ready is not None:
        return plan.ready
    known = _known(comm, plan)
    checked = _checked(plan, known)
    if known is None and _is_new(comm, plan.topology):
        comm.submit(_first_use(comm, plan, checked), nothing()).wait()
        _learn(comm, plan)
        known = _known(comm, plan)
    move, route = _routed(comm, plan, checked, known)
    if plan.kind is not None and known is not None and known.route is not None:
        comm.edges.remember(plan.kind, plan.topology, move, route)
    return move, route


def agree_on(comm: Comm, topology: Topology, step: int | None = None) -> None:
    """Have all ranks agree on a topology ahead of its first use, which then need not meet.

    Args:
        comm: A Comm.
        topology: What will be used.
        step: From which on, where it varies.
    """
    plan = EdgePlan("topology", nothing, topology, 0 if step is None else step)  # type: ignore[arg-type]
    if _is_new(comm, topology):
        comm.submit(_first_use(comm, plan, _checked(plan)), nothing()).wait()
        _learn(comm, plan)


def _known(comm: Comm, plan: EdgePlan) -> Known | None:
    """Return what the ranks know of a topology, if they have agreed on it."""
    edges, topology = comm.edges, plan.topology
    before, known = edges.latest
    if before is topology:
        return known
    try:
        known = edges.known.get(topology)
    except TypeError:  # it has no hash, so it is none
        return None
    if known is not None:
        edges.latest = topology, known
    return known


def _checked(plan: EdgePlan, known: Known | None = None) -> Move | Exception:
    try:
        if plan.route is None and (known is None or known.route is None or plan.step is not None):
            if not isinstance(plan.topology, Topology):
                raise TypeError(
                    f"topology must be a Topology such as Ring(), not {plan.topology!r}"
                )
            checked_step(plan.topology, plan.step)
        return plan.check()
    except Exception as error:
        return error


def _is_new(comm: Comm, topology: Any) -> bool:
    """Whether the ranks have yet to agree on it; equal on all ranks that have called alike."""
    if comm.size == 1 or topology is None:
        return False
    known = comm.edges.known
    return topology not in known if isinstance(topology, Topology) else not known


def _first_use(comm: Comm, plan: EdgePlan, checked: Move | Exception) -> Call:
    refusal = checked if isinstance(checked, Exception) else None
    if refusal is None:
        try:
            comm.edges.learning = look_at(plan.topology, *comm.seat, plan.step)
        except Exception as error:
            refusal = error
    return Call((f"first {plan.verb} over", repr(plan.topology)), refusal)


def _learn(comm: Comm, plan: EdgePlan) -> None:
    comm.edges.known[plan.topology] = comm.edges.learning


def _routed(
    comm: Comm, plan: EdgePlan, checked: Move | Exception, known: Known | None
) -> tuple[Move, Route]:
    """Return where a call goes; if it is refused, tell the neighbours and raise why."""
    topology, route = plan.topology, plan.route
    if comm.size == 1:
        route = _NOWHERE
    if route is None and known is not None:
        if plan.doubly and not known.doubly and not isinstance(checked, Exception):
            checked = ValueError(
                f"{topology!r} gives some rank more or less than it takes from it, so that "
                "averages would be biased: use push_sum, whose weight w corrects that"
            )
        if known.route is not None:
            route = known.route
        elif isinstance(plan.step, int):
            route = route_at(topology, *comm.seat, plan.step)
    if isinstance(checked, Exception):
        if route is not None and comm.size > 1:
            comm.decline(route, Call((plan.verb,), checked))
        raise checked
    assert route is not None
    return checked, route
