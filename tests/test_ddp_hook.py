"""`ddp_hook`: torch's DistributedDataParallel with the all-reduce of this library."""

import copy
import pickle
import socket
from contextlib import nullcontext

import numpy as np
import pytest

import relaxmpi as rx

torch = pytest.importorskip("torch")
nn, dist = torch.nn, torch.distributed
DDP = nn.parallel.DistributedDataParallel

CODED = {
    "qsgd8": (rx.Quantizer(bits=8), False),
    "qsgd4": (rx.Quantizer(bits=4), False),
    "qsgd4, feedback": (rx.Quantizer(bits=4), True),
    "sign": (rx.OneBit(), True),
    "bytegrad": (rx.MinMaxUInt8(), False),
    "fp16": (rx.Cast("fp16"), False),
}
SMALL = 1500 / 2**20  # MiB: several buckets for small models
coded = pytest.mark.parametrize(("codec", "feedback"), CODED.values(), ids=CODED)


def start_group(comm, rank=None):
    """Make gloo's process group, in the Comm's order unless told otherwise."""
    port = 0
    if comm.rank == 0:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
    port = rx.allreduce(comm, port, op=rx.MAX)
    rank = comm.rank if rank is None else rank
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=comm.size)


@pytest.fixture
def group(comm):
    torch.set_num_threads(1)
    start_group(comm)
    yield comm
    dist.destroy_process_group()


class Net(nn.Module):
    """Layers, one of which is used where and when it is asked for, and one never."""

    def __init__(self, spare=False):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)
        )
        if spare:
            self.sometimes, self.never = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, extra=False):
        y = self.body(x)
        return self.sometimes(y) if extra else y


class Spy:
    """What goes into a hook and what comes out, bucket by bucket."""

    def __init__(self, hook):
        self.hook, self.given, self.buffers, self.layouts = hook, [], [], []

    def register(self, model):
        def spy(state, bucket):
            if bucket.index() == 0:
                self.given, self.buffers = [], []
                self.layouts.append([])
            self.given.append(bucket.buffer().clone())
            self.buffers.append(bucket.buffer())
            self.layouts[-1].append([tuple(p.shape) for p in bucket.parameters()])
            return self.hook(state, bucket)

        model.register_comm_hook(model.process_group, spy)


def hooked(hook, model=None, **settings):
    model = DDP(Net() if model is None else model, bucket_cap_mb=SMALL, **settings)
    model.register_comm_hook(model.process_group, hook)
    return model


def batch(comm, step=0, rows=6):
    numbers = torch.Generator().manual_seed(100 * step + comm.rank)
    return torch.randn(rows, 8, generator=numbers)


def backward(comm, model, step=0, **how):
    model(batch(comm, step), **how).square().sum().backward()


def gradients(model):
    return torch.cat([p.grad.ravel() for p in model.parameters() if p.grad is not None])


def assert_same_everywhere(comm, x):
    seen = rx.allgather(comm, x)
    for r in range(1, comm.size):
        assert torch.equal(seen[r], seen[0]), f"rank {r} differs from rank 0"


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}],
    ids=lambda settings: ", ".join(settings) or "plain",
)
def test_law_full_precision_is_ddp_without_a_hook(group, settings):
    plain = DDP(Net(), bucket_cap_mb=SMALL, **settings)
    ours = hooked(rx.ddp_hook(comm=group), **settings)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (plain, ours)]
    for step in range(4):
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad()
            backward(group, model, step)
            optimizer.step()
        np.testing.assert_allclose(gradients(ours), gradients(plain), rtol=0, atol=3e-5)
        assert_same_everywhere(group, gradients(ours))
    assert_same_everywhere(group, torch.cat([p.detach().ravel() for p in ours.parameters()]))


@pytest.mark.ranks(2, 3)
def test_unused_parameters_are_treated_as_ddp_does(group):
    models = [
        DDP(Net(spare=True), bucket_cap_mb=SMALL, find_unused_parameters=True),
        hooked(rx.ddp_hook(comm=group), Net(spare=True), find_unused_parameters=True),
    ]
    for step in range(3):
        for model in models:
            model.zero_grad()
            backward(group, model, step, extra=group.rank == 0 and step > 0)
        for a, b in zip(*(model.parameters() for model in models), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                np.testing.assert_allclose(a.grad, b.grad, rtol=0, atol=3e-5)
        assert models[1].module.never.weight.grad is None
        assert (models[1].module.sometimes.weight.grad is None) == (step == 0)


@pytest.mark.ranks(1, 2, 3)
@coded
def test_law_a_bucket_is_what_allreduce_makes_of_it(group, codec, feedback):
    hook = rx.ddp_hook(codec, feedback=feedback, comm=group)
    model, spy = DDP(Net(), bucket_cap_mb=SMALL), Spy(hook)
    spy.register(model)
    memories = {}
    for step in range(4):
        model.zero_grad()
        backward(group, model, step)
        assert (len(spy.buffers) > 1) == (step > 0), "DDP begins with one bucket"
        for i, (given, result) in enumerate(zip(spy.given, spy.buffers, strict=True)):
            mean = rx.allreduce(group, given.clone(), op=rx.MEAN)
            bound = rx.allreduce(group, given.abs().max().item(), op=rx.MAX)
            how = codec
            if feedback:
                # The first backward is in full precision: DDP makes other buckets after it.
                how = memories.setdefault(i, rx.ErrorFeedback(codec)) if step else None
            want = rx.allreduce(
                group, given.clone(), op=rx.MEAN, codec=how, name=f"bucket {i}", step=step
            )
            assert torch.equal(result, want)
            assert_same_everywhere(group, result)
            if not feedback:
                assert (result - mean).abs().max() <= 2 * bound / 7  # two roundings to 4 bits
    assert spy.layouts[0] != spy.layouts[1] == spy.layouts[2], "DDP did not rebuild its buckets"


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("find_unused", [False, True], ids=["rebuilt", "never rebuilt"])
def test_law_feedback_telescopes_across_ddps_rebuild(group, find_unused):
    hook = rx.ddp_hook(rx.OneBit(), feedback=True, comm=group)
    model, spy = DDP(Net(), bucket_cap_mb=SMALL, find_unused_parameters=find_unused), Spy(hook)
    spy.register(model)
    wanted, got = 0.0, 0.0
    for step in range(6):
        model.zero_grad()
        backward(group, model, step)
        got = got + gradients(model).double()
        alone = copy.deepcopy(model.module)
        alone.zero_grad()
        backward(group, alone, step)
        wanted = wanted + rx.allreduce(group, gradients(alone).double(), op=rx.MEAN)
    assert (spy.layouts[0] == spy.layouts[1]) == find_unused
    owed = {}
    for memory, params in hook._memories.values():
        whole = torch.zeros(sum(p.numel() for p in params), dtype=torch.float64)
        for side, share in (("worker", 1 / group.size), ("owner", 1)):
            for (lo, hi), residual in memory.residual(side).items():
                whole[lo:hi] += share * torch.from_numpy(residual)
        rx.allreduce(group, whole)
        for p, part in zip(params, whole.split([p.numel() for p in params]), strict=True):
            owed[id(p)] = part
    owed = torch.cat([owed[id(p)] for p in model.parameters()])
    assert owed.abs().max() > 1e-2
    np.testing.assert_allclose(got, wanted - owed, rtol=0, atol=1e-4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_half_and_double_are_averaged_without_overflow(group, dtype):
    model = hooked(rx.ddp_hook(comm=group), nn.Linear(2, 2, bias=False).to(dtype))
    for _ in range(2):
        model.zero_grad()
        (model(torch.ones(1, 2, dtype=dtype)) * 40000).sum().backward()
        assert (model.module.weight.grad == torch.tensor(40000, dtype=dtype)).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("feedback", [False, True])
def test_no_sync_exchanges_the_sums_once(group, feedback):
    hook = rx.ddp_hook(rx.Quantizer(bits=8) if feedback else None, feedback=feedback, comm=group)
    model, alone = hooked(hook), Net()
    for window in range(3):
        model.zero_grad()
        alone.zero_grad()
        for step in range(3):
            before = hook.stats.payload_bytes
            with model.no_sync() if step < 2 else nullcontext():
                backward(group, model, 10 * window + step)
            assert (hook.stats.payload_bytes > before) == (step == 2)
            backward(group, alone, 10 * window + step)
        mean = rx.allreduce(group, gradients(alone), op=rx.MEAN)
        atol = mean.abs().max() / 30 if feedback else 3e-5
        np.testing.assert_allclose(gradients(model), mean, rtol=0, atol=atol)


@pytest.mark.ranks(3)
def test_ranks_that_have_joined_count_as_zero(group):
    model = hooked(rx.ddp_hook(comm=group))
    sums = 0.0
    with model.join():
        for step in range(2 + group.rank):
            model.zero_grad()
            backward(group, model, step)
            sums = sums + gradients(model)
    alone, mine = Net(), []
    for step in range(4):
        alone.zero_grad()
        backward(group, alone, step)
        mine.append(gradients(alone) * (step < 2 + group.rank))
    means = rx.allreduce(group, torch.stack(mine), op=rx.MEAN)
    np.testing.assert_allclose(sums, means[: 2 + group.rank].sum(0), rtol=0, atol=1e-4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("feedback", [False, True])
def test_a_saved_hook_goes_on(group, feedback):
    def run(hook, steps):
        model = hooked(hook)
        seen = []
        for step in steps:
            model.zero_grad()
            backward(group, model, step)
            seen.append(gradients(model))
        return seen

    def new():
        return rx.ddp_hook(rx.Quantizer(bits=2), feedback=feedback, comm=group)

    first, second = new(), new()
    run(first, range(4))
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    resumed = run(second, range(4, 8))
    if not feedback:
        # The first step's random numbers fall on other buckets, from the second on all is equal.
        straight = run(new(), range(8))
        assert all(torch.equal(a, b) for a, b in zip(resumed[1:], straight[5:], strict=True))
        return
    exact = run(rx.ddp_hook(comm=group), range(4, 8))
    assert torch.equal(resumed[0], exact[0])
    owed = lambda hook: [m.residual("worker") for m, _ in hook._memories.values()]  # noqa: E731
    third = new()
    third.load_state_dict(first.state_dict())
    assert len(third.state_dict()["buckets"]) == len(first.state_dict()["buckets"]) > 1
    run(third, range(4, 6))
    fourth = new()
    run(fourth, range(4, 6))
    assert all(
        not np.array_equal(a[key], b[key])
        for a, b in zip(owed(third), owed(fourth), strict=True)
        for key in a
    ), "what was owed was not paid"
    other = new()
    other.load_state_dict(first.state_dict())
    model = DDP(Net())
    model.register_comm_hook(model.process_group, other)
    backward(group, model)
    with pytest.raises(ValueError, match="belongs to other buckets: number 0"):
        backward(group, model)


@pytest.mark.ranks(2)
def test_a_hierarchy_goes_too(group):
    with group.by_node() as nodes:
        model = hooked(rx.ddp_hook(rx.Quantizer(bits=4), comm=nodes))
        plain = hooked(rx.ddp_hook(comm=group))
        for step in range(3):
            backward(group, model, step)
            backward(group, plain, step)
        np.testing.assert_allclose(gradients(model), gradients(plain), rtol=0, atol=3e-5)


@pytest.mark.ranks(2, 3)
def test_the_hook_is_refused_on_all_ranks(group):
    with pytest.raises(TypeError, match="feedback=True"):
        rx.ddp_hook(rx.ErrorFeedback(rx.OneBit()), comm=group)
    with pytest.raises(ValueError, match="needs a codec"):
        rx.ddp_hook(feedback=True, comm=group)
    with pytest.raises(rx.MismatchError, match=r"bits=4.*bits=8"):
        rx.ddp_hook(rx.Quantizer(bits=4 if group.rank == 0 else 8), comm=group)
    with pytest.raises(TypeError, match="first argument"):
        rx.ddp_hook(comm=group.mpi)
    hook = rx.ddp_hook(comm=group)
    with pytest.raises(TypeError, match=r"model\.module"):
        pickle.dumps(hook)
    hook.close()


@pytest.mark.ranks(2)
def test_without_a_process_group_the_hook_is_refused(comm):
    with pytest.raises(rx.RelaxError, match="init_process_group"):
        rx.ddp_hook(comm=comm)


@pytest.mark.ranks(2, 3)
def test_another_state_than_ddps_group_is_refused_on_all_ranks(group):
    for wrong, errors in [
        (lambda rank: False, ()),
        (lambda rank: True, TypeError),
        (lambda rank: rank == 0, (TypeError, rx.MismatchError)),
    ]:
        model = DDP(Net())
        state = None if wrong(group.rank) else model.process_group
        model.register_comm_hook(state, rx.ddp_hook(comm=group))
        with pytest.raises(errors, match=r"model\.process_group") if errors else nullcontext():
            backward(group, model)


@pytest.mark.ranks(3)
def test_a_group_of_other_ranks_is_refused(group):
    part = dist.new_group([0, 1])
    with group.split(group.rank // 2) as half:
        if group.rank < 2:
            model = DDP(Net(), process_group=part)
            model.register_comm_hook(part, rx.ddp_hook(comm=half))
            backward(group, model)
            assert_same_everywhere(half, gradients(model))
            model = DDP(Net())
        else:
            rx.ddp_hook(comm=half)
            model = DDP(Net())
        model.register_comm_hook(model.process_group, rx.ddp_hook(comm=half))
        with pytest.raises(ValueError, match="3 ranks, and the Comm has"):
            backward(group, model)


@pytest.mark.ranks(3)
def test_a_group_in_another_order_is_refused_on_all_ranks(comm):
    start_group(comm, rank=(comm.rank + 1) % comm.size)
    try:
        model = hooked(rx.ddp_hook(comm=comm))
        with pytest.raises(ValueError, match=r"\[1, 2, 0\].*are \[0, 1, 2\].*rank=comm\.rank"):
            backward(comm, model)
    finally:
        dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_sparse_gradients_are_refused_on_all_ranks(group):
    model = hooked(rx.ddp_hook(comm=group), nn.Embedding(4, 2, sparse=True))
    with pytest.raises(TypeError, match="sparse=False"):
        model(torch.tensor([group.rank])).sum().backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("codec", [None, rx.Quantizer(bits=8)], ids=str)
def test_complex_gradients_are_averaged(group, codec):
    model = hooked(rx.ddp_hook(codec, comm=group), nn.Linear(2, 1, False, dtype=torch.complex64))
    model(torch.full((1, 2), complex(group.rank, 2))).real.sum().backward()
    assert (gradients(model) - complex(0.5, -2)).abs().max() < (0.05 if codec else 1e-6)


@pytest.mark.ranks(2)
def test_one_hook_with_memory_is_not_shared_by_two_models(group):
    hook = rx.ddp_hook(rx.OneBit(), feedback=True, comm=group)
    models = [hooked(hook), hooked(hook)]
    for model in models * 2:
        try:
            backward(group, model)
        except rx.RelaxError as error:
            assert "ddp_hook of its own" in str(error)
            return
    pytest.fail("not refused")


FAILS = """
import sys, torch, torch.distributed as dist, relaxmpi as rx
comm = rx.Comm.world(timeout=10)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=comm.rank,
                        world_size=comm.size)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))

class Tired(rx.Cast):
    left = 2
    def encode(self, *args, **kwargs):
        if comm.rank == 1:
            Tired.left -= 1
            if Tired.left < 0:
                raise ArithmeticError("tired")
        super().encode(*args, **kwargs)

model.register_comm_hook(model.process_group, rx.ddp_hook(Tired("fp16"), comm=comm))
try:
    for step in range(9):
        model(torch.ones(2, 3)).sum().backward()
except Exception as error:
    if len(sys.argv) < 3:
        raise
    print(comm.rank, "raised", type(error).__name__, error)
"""


@pytest.mark.long
@pytest.mark.parametrize("caught", [False, True])
def test_an_error_in_the_middle_of_a_call_reaches_all_ranks(launch, tmp_path, caught):
    done = launch(FAILS, 3, str(tmp_path / "store"), *["caught"] * caught, timeout=60)
    assert done.returncode != 0
    assert done.seconds < 30
    assert "tired" in done.stdout + done.stderr
    if caught:
        assert done.stdout.count("raised") == 3
    else:
        assert "rank 1 of 3 failed" in done.stderr
