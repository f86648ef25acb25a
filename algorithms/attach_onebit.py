"""1-bit Adam as an optimizer of torch: by itself, or inside `attach`, during backward."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from relaxmpi.algorithms.adamw import work_format
from relaxmpi.algorithms.attach_exchange import Exchange
from relaxmpi.algorithms.attach_flags import NonFinite
from relaxmpi.algorithms.attach_parameters import ParameterBound, phase_of, rule_of
from relaxmpi.algorithms.onebit_adam import OneBitAdam
from relaxmpi.primitives import MEAN, Comm, RelaxError, allreduce
from relaxmpi.primitives.devices import device_of

__all__ = ["OneBitAdamOptimizer"]

_LIMITS = (4 << 20, 1 << 20)  # bytes of a bucket, and of the first one, as in `attach`


class OneBitAdamOptimizer(torch.optim.Optimizer):
    """`OneBitAdam` for parameter groups, schedulers and checkpoints; `step()` is collective.

    By itself it exchanges in `step()`, one message pattern for each bucket of about 4 MiB, of one
    parameter group and dtype; every rank must start with the same parameters. Inside `attach`,
    with the same algorithm, buckets leave during backward, and parameters become those of rank 0:

        one_bit = rx.OneBitAdam(freeze=2_000)
        optimizer = rx.OneBitAdamOptimizer(model.parameters(), one_bit, lr=1e-3, comm=comm)
        sync = rx.attach(model, optimizer, one_bit, comm=comm)

    What it computes is the algorithm's docstring, for each bucket. What else must be known:

    - The state is that of torch.optim.Adam (`step`, `exp_avg`, `exp_avg_sq`; float32 for half
      precision), and `updates` (of `exp_avg_sq`), `age` and `frozen`. What codecs owe is this
      rank's own: under "exchange" in `state_dict()`, or in `sync.state_dict()` inside `attach`,
      which is to be loaded after the optimizer's.
    - In the warm-up a parameter without a gradient on every rank is left alone, as in torch; later
      that counts as zero. Parameters that had none when their bucket was frozen stay in warm-up.
      Parameters added or unfrozen later get buckets, and a warm-up, of their own; for that the
      optimizer makes its buckets anew (inside `attach`: detach and attach again), and what codecs
      owe begins at zero.
    - After the freeze gradients stay local, in `p.grad` too. So clip with `max_norm`, over all
      parameters of the optimizer; inside `attach` nothing leaves before the end of backward then.
    - A `GradScaler` works with the optimizer by itself: each rank unscales by its own scale, and
      steps that are not finite on any rank are left out on all (`skipped`).

    Args:
        params: Parameters, or groups with settings of their own; float16 to float64.
        algorithm: Its `rule` gives the defaults of the settings.
        comm: A Comm, or a Hierarchy; a private duplicate is used.
        lr: Step length.
        betas: See `AdamW`; None means those of `algorithm.rule`, also below.
        eps: See `AdamW`.
        weight_decay: See `AdamW`.
        decoupled: See `AdamW`.

    Attributes:
        algorithm: As given.
        skipped: Steps left out.

    Example:
        >>> import torch, relaxmpi as rx
        >>> model = torch.nn.Linear(3, 1)
        >>> with rx.Comm.world() as comm:
        ...     optimizer = rx.OneBitAdamOptimizer(
        ...         model.parameters(), rx.OneBitAdam(freeze=10), comm=comm, lr=0.1
        ...     )
        ...     model(torch.ones(2, 3)).sum().backward()
        ...     optimizer.step()
        >>> sorted(optimizer.state[model.weight])
        ['age', 'exp_avg', 'exp_avg_sq', 'frozen', 'step', 'updates']
    """

    # A GradScaler then calls step() on every rank, also where a gradient is infinite.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        algorithm: OneBitAdam,
        *,
        comm: Comm,
        lr: float = 1e-3,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        decoupled: bool | None = None,
    ) -> None:
        if not isinstance(algorithm, OneBitAdam):
            raise TypeError(f"the algorithm must be OneBitAdam(freeze=...), not {algorithm!r}")
        rule = algorithm.rule
        self.algorithm, self.comm, self.skipped = algorithm, comm, 0
        self._alone: Exchange | None = None
        self._made_for: list[Any] = []
        self._attached = False
        self._ready: list[tuple[ParameterBound, Any]] | None = None
        self._bounds: list[ParameterBound] = []
        self._saved: dict[str, Any] | None = None
        self._resized = False
        self._stepping: list[ParameterBound] = []
        self._squares: float | None = None
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": rule.betas if betas is None else betas,
                "eps": rule.eps if eps is None else eps,
                "weight_decay": rule.weight_decay if weight_decay is None else weight_decay,
                "decoupled": rule.decoupled if decoupled is None else decoupled,
            },
        )
        for group in self.param_groups:
            rule_of(group)  # refuses what is no rule
            for p in group["params"]:
                work_format(device_of(p).flat(p, writable=False, strided=True))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange, unless `attach` has, and step; collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            self._unscale(float(scale))
        ready, self._ready = self._ready, None
        if ready is None:
            ready = self._one_rank() if self.comm.size == 1 else self._exchanged()
        self._stepping = [bound for bound, _ in ready]
        finite = [bound.arrived(g) for bound, g in ready]  # each of them must look
        if all(finite):
            for bound, _ in ready:
                bound.take()
                bound.publish()
        else:
            self.skipped += 1
            for bound, _ in ready:
                bound.leave_out()
        self._squares = None
        return loss

    def _unscale(self, scale: float) -> None:
        if self._attached and self.comm.size > 1:
            raise RelaxError(
                "inside attach gradients have left before a GradScaler could unscale them: use "
                "the optimizer by itself with one"
            )
        for p in self._params():
            if p.grad is not None:
                p.grad.mul_(1 / scale)

    def _params(self) -> Iterator[Any]:
        for group in self.param_groups:
            yield from group["params"]

    def _one_rank(self) -> list[tuple[ParameterBound, Any]]:
        """Each parameter by itself: nothing is sent."""
        held = {id(bound.segments[0].x): bound for bound in self._bounds}
        ready = []
        for p in self._params():
            if p.grad is not None:
                bound = held.get(id(p)) or self.bucket(self.comm, [p], p, "")
                ready.append((bound, p.grad.detach().contiguous()))
        return ready

    def _exchanged(self) -> list[tuple[ParameterBound, Any]]:
        """Exchange the gradients of this step."""
        if self._attached:
            raise RelaxError("this optimizer steps inside attach, whose hooks were removed")
        made_for = [(id(p), p.requires_grad) for p in self._params()]
        if self._alone is None or made_for != self._made_for:
            self._begin()
            self._made_for = made_for
        assert self._alone is not None
        self._alone.before_step()
        ready, self._ready = self._ready, None
        return ready or []

    def _begin(self) -> None:
        """Make buckets, for the first time or for other parameters than before."""
        if self._alone is not None:
            self._alone.give_back()
        model = nn.Module()
        for i, p in enumerate(self._params()):
            model.register_parameter(f"parameter {i}".replace(" ", "_"), p)
        own = self.comm.dup()
        settings = (own, _LIMITS, False, NonFinite.PASS)
        self._bounds.clear()
        self._alone = Exchange(model, self, self.algorithm, *settings)
        self._attached = False
        if self._saved is not None:
            saved, self._saved = self._saved, None
            index = {slot.name: slot.index for slot in self._alone.slots}
            if sorted(saved["order"]) != sorted(index):
                raise ValueError("this state is of an optimizer of other trained parameters")
            self._alone.lay_out([index[name] for name in saved["order"]])
            for part in self._alone.parts:
                part.bound.load(saved["buckets"][part.name], resized=self._resized)

    # What `Exchange` asks of an optimizer that is the algorithm's own rule.

    def taken_over(self, *, attached: bool) -> None:
        """Be told who exchanges gradients from now on; what was known of buckets is void."""
        if attached and self._alone is not None:
            self._alone.give_back()
            self._alone, self._made_for = None, []
        self._attached, self._ready = attached, None
        self._bounds.clear()

    def kind(self, p: Any) -> Hashable:
        """What parameters of one bucket have in common."""
        group = next(i for i, g in enumerate(self.param_groups) if any(p is q for q in g["params"]))
        return (group, *phase_of(self.state.get(p, {})))

    def bucket(self, comm: Comm, params: list[Any], flat: Any, name: str) -> ParameterBound:
        """Return the algorithm's state for a bucket, with what is known of its parameters."""
        group = next(g for g in self.param_groups if any(params[0] is q for q in g["params"]))
        bound = ParameterBound(self, comm, params, flat, group, name)
        self._bounds.append(bound)
        return bound

    @property
    def overlaps(self) -> bool:
        """Whether buckets may leave before all are full; not where the norm of all is needed."""
        return self.algorithm.max_norm is None

    def exchanged(self, ready: list[tuple[Any, Any, bool]]) -> None:
        """Be told the buckets and gradients of the step that follows."""
        if any(bound.momenta is not None and touched for bound, _, touched in ready):
            raise RelaxError(
                "gradients were changed after the exchange, which sends momenta since the variance "
                "is frozen: it would have no effect; to clip, use OneBitAdam(max_norm=...)"
            )
        self._ready = [(bound, g) for bound, g, _ in ready]

    def measure(self) -> None:
        """Find the norm for `max_norm` before gradients leave, where some of them stay local."""
        frozen = any(bound.momenta is not None for bound in self._bounds)
        if self.algorithm.max_norm is not None and frozen and self._squares is None:
            mine = sum(bound.own_squares(bound.flat) for bound in self._bounds)
            told = allreduce(self._bounds[0].comm, mine, op=MEAN, name="squares")
            self._squares = float(told)

    def squares(self) -> float:
        """The square of the norm of all gradients."""
        if self._squares is None:
            self._squares = sum(bound.own_squares(bound.g) for bound in self._stepping)
        return self._squares

    def state_dict(self) -> dict[str, Any]:
        """Return the state of an optimizer, and under "exchange" what codecs owe on this rank."""
        state = super().state_dict()
        exchange = self._alone
        state["exchange"] = self._saved
        if exchange is not None and exchange.parts:
            order = [exchange.slots[i].name for i in exchange.order]
            buckets = {part.name: part.bound.state_dict() for part in exchange.parts}
            state["exchange"] = {"order": order, "buckets": buckets}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, on this rank."""
        state = dict(state_dict)
        self._saved, self._resized = state.pop("exchange", None), False
        super().load_state_dict(state)
        saved = (i for group in state["param_groups"] for i in group["params"])
        for p, i in zip(self._params(), saved, strict=True):
            if i in state["state"]:  # torch has rounded them to the format of the parameter
                self.state[p] = {k: v.clone() for k, v in state["state"][i].items()}
        self._made_for = []
        for bound in self._bounds:
            bound.adopt()

    def load_resized(self, state_dict: dict[str, Any]) -> None:
        """Restore what another number of ranks saved, without what their codecs owed."""
        self.load_state_dict(state_dict)
        self._resized = True
