"""The part of `attach` that mixes parameters: buckets of them, and what happens around a step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from relaxmpi.algorithms.attach_engine import Engine
from relaxmpi.algorithms.attach_flags import NonFinite
from relaxmpi.algorithms.attach_portion import Poke, Portion
from relaxmpi.algorithms.attach_stats import Meter
from relaxmpi.algorithms.base import Algorithm, Bound
from relaxmpi.primitives import (
    MEAN,
    Comm,
    NonFiniteError,
    RelaxError,
    allreduce,
    barrier,
    buckets_of,
)

__all__ = ["Mixing"]

_log = logging.getLogger("relaxmpi")


class Mixing(Engine):
    """Mixes the parameters of the ranks after each step of the optimizer.

    All parameters are final at once, when the optimizer has stepped, so nothing is gained by
    small buckets: one a dtype holds them all unless the caller wants otherwise.

    The number of steps is not compared in each one, nor are learning rates: the ranks of a
    gossip have no message in common, and each may descend at its own rate.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        algorithm: Algorithm,
        comm: Comm,
        limits: tuple[int, int],
        overlap: bool,
        nonfinite: NonFinite,
    ) -> None:
        super().__init__(model, optimizer, comm)
        self._optimizer, self._algorithm = optimizer, algorithm
        self._nonfinite, self._overlap = nonfinite, overlap
        self._shown = self._warned = False
        tensors = (*model.parameters(), *model.buffers())
        uses = Counter(t.untyped_storage().data_ptr() for t in tensors if t.layout is torch.strided)
        self._tied = {address for address, count in uses.items() if count > 1}
        self.parts: list[Portion] = []
        if comm.size > 1 or algorithm.acts_alone:
            self.parts = self._lay_out(limits[0])
        self.meter = Meter([comm], [self.control])

    def _lay_out(self, limit: int) -> list[Portion]:
        named = self.watch.trained
        sizes = [p.numel() * p.element_size() for _, p in named]
        kinds = [(p.dtype, p.device) for _, p in named]
        groups = buckets_of(sizes, limit, kinds=kinds)
        return [
            Portion(
                [named[i] for i in group], self._algorithm, self.comm, f"bucket {b}", self._tied
            )
            for b, group in enumerate(groups)
        ]

    @property
    def bound(self) -> list[Bound]:
        """One a bucket, from the start."""
        return [part.bound for part in self.parts]

    def hooks(self) -> list[Any]:
        """Hooks that make progress."""
        if self.comm.size == 1 or not self._overlap:
            return []
        # The method is untyped in torch.
        adders: list[Any] = [p.register_post_accumulate_grad_hook for _, p in self.watch.trained]
        poke = Poke(self.bound)
        return [add(poke) for add in adders]

    def wait(self) -> None:
        """Nothing: gradients are local."""

    def before_step(self) -> None:
        """Let the optimizer step what the algorithm wants stepped."""
        if objection := self.objection():
            raise RelaxError(objection)
        if not self.parts:
            return
        if self._nonfinite is not NonFinite.PASS:
            self._judge_gradients()
        before = self.comm.stats.waited
        lr = float(self._optimizer.param_groups[0].get("lr", 0.0))
        for part in self.parts:
            bound = part.bound
            bound.lr = lr
            name = part.changed()  # before x does
            if not bound.before_step() and part.stepped_as_shown:
                continue
            if name:
                raise RelaxError(
                    f"parameter {name} was changed between two steps, and would be lost: "
                    "meanwhile neighbours have sent theirs, or the optimizer steps the numerator "
                    "of push-sum; restore parameters before sync.load_state_dict(), or detach "
                    "and attach again"
                )
            part.show(bound.stepped)
        self.meter.exposed(self.comm.stats.waited - before)

    def after_step(self) -> None:
        """Mix."""
        for part in self.parts:
            part.fetch(part.bound.stepped)
        if self._nonfinite is NonFinite.RAISE:
            self._judge_parameters()
        before = self.comm.stats.waited
        for part in self.parts:
            if part.bound.on_params() is not False:
                part.show_model()
        self.meter.exposed(self.comm.stats.waited - before)

    def objection(self) -> str:
        """Say what the user did that makes a step wrong."""
        if self._shown:
            return "optimizer.step() inside averaged(): these parameters are the mean, not yours"
        return super().objection()

    def _judge_gradients(self) -> None:
        """Leave a step out on this rank, or raise, before a NaN reaches any parameter."""
        for part in self.parts:
            name = part.not_finite([p.grad for _, p in part.named])
            if not name:
                continue
            if self._nonfinite is NonFinite.RAISE:
                raise self._error(f"the gradient of {name}")
            for _, p in self.watch.trained:
                p.grad = None
            self.meter.skipped += 1
            return

    def _judge_parameters(self) -> None:
        """Raise before neighbours are told."""
        for part in self.parts:
            if name := part.not_finite([p.detach() for _, p in part.named]):
                raise self._error(f"parameter {name}")

    def _error(self, what: str) -> NonFiniteError:
        return NonFiniteError(
            f"{what} is not finite on rank {self.comm.rank} in step {self.meter.steps}; nothing of "
            "it was sent; NonFinite.SKIP would leave out such steps of this rank"
        )

    def meet(self, what: str) -> None:
        """See `Engine`."""
        done = f" after {self.meter.steps} steps" if self._algorithm.lockstep else ""
        barrier(self.control, name=what + done)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Show the mean model, then the own one again."""
        if self._shown:
            raise RelaxError("averaged() inside averaged()")
        self.meet("averaged()")
        for part in self.parts:
            part.bound.quiesce()
            # The user may have changed them since the last step, or, in x, a neighbour.
            if part.stepped_as_shown and (self._algorithm.lockstep or part.changed()):
                part.fetch(part.bound.stepped)
            part.show(self._mean(part))
        self._shown = True
        try:
            yield
        finally:
            self._shown = False
            for part in self.parts:
                part.show_model()
                part.forget()

    def spread(self) -> float:
        """Compare each model with the mean."""
        self.meet("spread()")
        apart = norm = 0.0
        for part in self.parts:
            mean = self._mean(part)
            flat, by = part.bound.model()
            apart += float((flat / by - mean).double().square().sum())
            norm += float(mean.double().square().sum())
        apart = allreduce(self.control, apart, op=MEAN, name="distance to the mean")
        return float((apart / norm) ** 0.5) if norm else 0.0

    @property
    def apart(self) -> str:
        """See `Engine`."""
        return (
            ""
            if self._shown
            else ", as it may where parameters are mixed: see sync.spread() for how far, and "
            "check inside sync.averaged()"
        )

    def _mean(self, part: Portion) -> Any:
        """Return the mean model of a bucket; say once if it is none."""
        mean = part.bound.mean()
        if not self._warned and not bool(torch.isfinite(mean).all()):
            self._warned = True
            if self.comm.rank == 0:
                _log.warning(
                    "the mean model is not finite in step %d: training has diverged; lower the "
                    "learning rate, and let attach(nonfinite=NonFinite.RAISE) say where it begins",
                    self.meter.steps,
                )
        return mean

    @property
    def keeps_state(self) -> bool:
        """Whether the algorithm has more than parameters show; those of averaged() are enough."""
        return not self._shown and any(
            type(bound).state_dict is not Bound.state_dict for bound in self.bound
        )

    def quiesce(self) -> None:
        """Wait for parameters on their way."""
        self._outside("save(sync=...)")
        self.meet("save()")
        for part in self.parts:
            part.bound.quiesce()
            if not self._algorithm.lockstep:  # x has taken in what was on its way
                part.show_model()

    def state_dict(self) -> dict[str, Any]:
        """The state of each bucket."""
        self._outside("sync.state_dict()")
        names = [[name for name, _ in part.named] for part in self.parts]
        kind = self.parts[0].bound.kind if self.parts else ""
        return {
            "kind": kind,
            "order": names,
            "buckets": {p.name: p.bound.state_dict() for p in self.parts},
        }

    def _outside(self, what: str) -> None:
        """Refuse what would take the mean model for this rank's own."""
        if self._shown:
            raise RelaxError(
                f"{what} inside averaged(): the parameters are the mean there, which does not go "
                "with this rank's own state: leave the block first, or save the model alone"
            )

    def load_state_dict(self, state: dict[str, Any], *, resized: bool) -> None:
        """Fill the buckets; the parameters are restored already."""
        self._outside("sync.load_state_dict()")
        order, buckets = state["order"], state["buckets"]
        barrier(self.control, name=f"restored buckets {order}")
        # One rank has none where the algorithm does nothing there, and others begin anew from it.
        if self.parts and order and order != [[name for name, _ in p.named] for p in self.parts]:
            raise ValueError(
                "this state is of a model with other trained parameters, or was saved with other "
                "bucket sizes"
            )
        for part in self.parts:
            if order and state["kind"] != part.bound.kind:
                raise ValueError(
                    f"this state is of {state['kind']}, not of {part.bound.kind}: attach the "
                    "algorithm that it was saved with, or begin anew from the parameters alone"
                )
        for part in self.parts:
            part.bound.quiesce()  # it may still read x
            part.fetch(part.flat)
            if order:
                part.bound.load(buckets[part.name], resized=resized)
            else:
                part.bound.replace(part.flat.clone())
            part.show_model()

    def end(self) -> None:
        """Fold in what is on its way."""
        self._outside("sync.detach()")
        self.meet("detach()")
        for part in self.parts:
            part.bound.finish()
            part.show_model()
            part.release()
        for stream in (self.comm, self.control):
            stream.close()

    def abandon(self) -> None:
        """Nothing: what is on its way stays there."""
