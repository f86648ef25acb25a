"""`ddp_hook`: the all-reduce of this library inside torch's DistributedDataParallel.

DDP keeps its buckets, its overlap and its process group; a communication hook takes each bucket
from it. The hook of a bucket starts the exchange and returns, so that buckets travel while
backward computes. DDP waits for the futures of all buckets in C++, where nobody could move
messages, so the hook of the last bucket, behind which backward has nothing left to compute,
waits for all and completes every future: an error is raised there, out of `backward()`. (With
a progress thread besides, two ranks on two cores were no faster and four were slower.)
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with types.

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # made at run time

from relaxmpi.primitives import (
    MEAN,
    Codec,
    Comm,
    ErrorFeedback,
    RelaxError,
    Work,
    allgather,
    allreduce,
    barrier,
    primitive,
)
from relaxmpi.primitives.stats import Stats
from relaxmpi.primitives.work import Flow

__all__ = ["DDPHook", "ddp_hook"]

_INIT = (
    "start the job with mpirun and give both the same ranks in the same order: "
    'init_process_group("gloo", rank=comm.rank, world_size=comm.size)'
)


def ddp_hook(
    codec: Codec | None = None, *, feedback: bool = False, comm: Comm | None = None
) -> "DDPHook":
    """Return a communication hook that averages DDP's gradients by `allreduce`; collective.

    Register it with DDP's own process group as the state:

        model.register_comm_hook(model.process_group, rx.ddp_hook(rx.Quantizer(bits=4)))

    After backward all ranks hold the same gradients: the mean over the ranks, each value quantised
    twice where there is a codec. Everything else stays DDP's: buckets (`bucket_cap_mb`,
    `gradient_as_bucket_view`), `no_sync`, unused parameters, `static_graph`, buffers, `join`
    (ranks that have joined count as zero, and the mean is over all). Gradients are averaged
    in their own dtype, so half precision is summed in float32. Sparse gradients are refused.

    With feedback each bucket remembers what the codec lost of it. The first backward then goes in
    full precision, because DDP rebuilds its buckets after it.

    Args:
        codec: What encodes the gradients; None averages in full precision.
        feedback: Remember what was lost, on both sides (see `ErrorFeedback`).
        comm: The ranks of DDP's process group in its order, of which a private duplicate is used;
            None means all ranks of the job. A Hierarchy goes too.

    Returns:
        The hook, one for each model.

    Raises:
        MismatchError: The ranks want different codecs.
        RelaxError: torch.distributed has no process group yet.
        TypeError: `codec` is none.

    Example:
        >>> import torch, torch.distributed as dist, relaxmpi as rx
        >>> comm = rx.Comm.world()
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
        >>> hook = rx.ddp_hook(rx.Quantizer(bits=4), comm=comm)
        >>> model.register_comm_hook(model.process_group, hook)
        >>> model(torch.ones(2, 3)).sum().backward()
        >>> model.module.weight.grad
        tensor([[2., 2., 2.]])
        >>> dist.destroy_process_group()
    """
    ranks = Comm.world() if comm is None else comm
    _hooking(ranks, codec, feedback)
    return DDPHook(ranks if comm is None else ranks.dup(), codec, feedback)


class DDPHook:
    """How the gradients of one DDP model are averaged; made by `ddp_hook`."""

    def __init__(self, comm: Comm, codec: Codec | None, feedback: bool) -> None:
        self.__name__ = self.__qualname__ = "ddp_hook"  # DDP asks for both
        self._comm, self._codec, self._feedback = comm, codec, feedback
        told = allgather(comm, torch.tensor([dist.get_rank()]))
        self._ranks: list[int] = told.flatten().tolist()
        self._checked = False
        self._group: object = None
        self._pending: list[tuple[Work[torch.Tensor], torch.futures.Future[torch.Tensor]]] = []
        self._steps, self._rebuilt = 0, False
        # By the parameters of the bucket, which are kept so that their ids are not given away.
        self._memories: dict[tuple[int, ...], tuple[ErrorFeedback, list[torch.Tensor]]] = {}
        self._saved: list[tuple[list[torch.Size], dict[str, Any]]] = []

    def __call__(
        self, state: dist.ProcessGroup, bucket: GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Start to average a bucket in place; DDP calls it in bucket order on all ranks."""
        if not self._checked or state is not self._group:
            self._check_group(state)
        flat = bucket.buffer()
        if flat.layout is not torch.strided:
            raise TypeError(
                f"DDP exchanges a {flat.layout} gradient, which ddp_hook does not average: make "
                "the embedding with sparse=False"
            )
        work = allreduce.start(
            self._comm,
            flat,
            op=MEAN,
            codec=self._memory(bucket) if self._feedback else self._codec,
            name=f"bucket {bucket.index()}",
            step=self._steps,
        )
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._pending.append((work, future))
        if bucket.is_last():
            self._finish()
        return future

    def _finish(self) -> None:
        pending, self._pending = self._pending, []
        for work, future in pending:
            future.set_result(work.wait())
        self._steps += 1
        self._rebuilt = True

    def _check_group(self, group: object) -> None:
        """Refuse a group whose ranks are not those of the Comm, in its order."""
        told = dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else None
        if told is not None and len(told) != len(self._ranks):
            # Not agreed on: ranks of the Comm that are not in the group do not come.
            raise ValueError(
                f"DDP's process group has {len(told)} ranks, and the Comm has {len(self._ranks)}: "
                f"{_INIT}; for a part of the ranks, ddp_hook takes comm=comm.split(...)"
            )
        _same_ranks(self._comm, told, self._ranks)
        self._group, self._checked = group, True

    def _memory(self, bucket: GradBucket) -> ErrorFeedback | None:
        """Return what remembers the losses of these parameters; None before the rebuild."""
        if not self._rebuilt:
            return None
        params = bucket.parameters()
        key = tuple(map(id, params))
        if key not in self._memories:
            index = bucket.index()
            if len(self._memories) > index:
                raise RelaxError(
                    "DDP's buckets hold other parameters than before, so what the codec lost would "
                    "go astray: give each model a ddp_hook of its own, and let a forward pass "
                    "precede each backward pass"
                )
            assert self._codec is not None  # ddp_hook has looked
            memory = ErrorFeedback(self._codec)
            if self._saved:
                shapes, owed = self._saved[index] if index < len(self._saved) else ([], {})
                if shapes != [p.shape for p in params]:
                    raise ValueError(
                        f"the state that was loaded belongs to other buckets: number {index} had "
                        f"parameters of {list(map(tuple, shapes))}; use the same model and "
                        "bucket_cap_mb"
                    )
                memory.load_state_dict(owed)
            self._memories[key] = memory, params
        return self._memories[key][0]

    @property
    def stats(self) -> Stats:
        """Bytes, messages and seconds waited since this hook was made."""
        return self._comm.stats

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must save, besides model and optimizer, to resume.

        The first step after it is not that of a run that was never stopped, because DDP begins
        with other buckets: they are rounded otherwise or, with feedback, go in full precision,
        and what was owed is paid from the next step on.
        """
        held = [([p.shape for p in ps], m.state_dict()) for m, ps in self._memories.values()]
        return {"steps": self._steps, "buckets": held or self._saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank."""
        self._steps, self._saved = state["steps"], state["buckets"]
        self._memories.clear()

    def close(self) -> None:
        """Give the private Comm back, after the last backward pass. Never communicates."""
        self._comm.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a DDP model with a ddp_hook cannot be pickled or copied: use model.module or its "
            "state_dict(), and the hook's state_dict()"
        )


@primitive
def _hooking(comm: Comm, codec: Codec | None, feedback: bool) -> Flow[None]:
    """Agree on the codec, or raise on every rank."""
    if not (codec is None or isinstance(codec, Codec)):
        raise TypeError(
            f"codec must be a Codec such as Quantizer(bits=8), not {codec!r}: each bucket makes "
            "its own memory, with feedback=True"
        )
    if feedback and codec is None:
        raise ValueError("feedback=True needs a codec: full precision loses nothing")
    if not dist.is_initialized():
        raise RelaxError(f"DDP has no process group yet: {_INIT}")
    told = "full precision" if codec is None else codec.describe()
    return barrier.flow(comm, name=f"DDP hook, {told}{', feedback' if feedback else ''}")


@primitive
def _same_ranks(comm: Comm, theirs: list[int] | None, ours: list[int]) -> Flow[None]:
    """Raise on every rank unless DDP's process group is the Comm."""
    if theirs is None:
        raise TypeError(
            "the state of ddp_hook is DDP's process group: "
            "model.register_comm_hook(model.process_group, hook)"
        )
    if theirs != ours:
        raise ValueError(
            f"the Comm's ranks are {ours} in the default process group, but DDP's are {theirs}: "
            f"{_INIT}"
        )
    return barrier.flow(comm, name="DDP's process group")
