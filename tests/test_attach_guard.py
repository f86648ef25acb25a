"""`attach` guards: not-finite gradients, gradients on their way, ranks that drift apart."""

import pytest
from loops import (
    SINGLE,
    SMALL,
    loss_of,
    nn,
    numbers,
    perceptron,
    push,
    sgd_of,
    torch,
    weight_of,
)

import relaxmpi as rx

CODECS = {
    "none": rx.SGD(),
    "8 bit": rx.QSGD(bits=8),
    "sign": rx.QSGD(bits=1, feedback=True),
    "4 bit, feedback": rx.QSGD(bits=4, feedback=True),
    "min-max": rx.ByteGrad(feedback=True),
    "top-k": rx.QSGD(codec=rx.TopK(0.5), feedback=True),
}
BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def all_the_same(comm, error):
    """Whether all ranks got an error of the same words."""
    texts = comm.mpi.allgather(str(error.value))
    return texts == [texts[0]] * comm.size


def spoil(model, bad):
    with torch.no_grad():
        model[2].weight.grad = None
    (model[2].weight * bad).sum().backward()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("step", [0, 2])
def test_raise_names_rank_step_and_parameter_everywhere(comm, bad, step):
    model = perceptron()
    optimizer = sgd_of(model)
    guard = rx.NonFinite.RAISE
    with rx.attach(model, optimizer, rx.SGD(), comm=comm, nonfinite=guard, **SMALL) as sync:
        for t in range(4):
            optimizer.zero_grad()
            before = numbers(model)
            scale = bad if t == step and comm.rank == 1 else 1.0
            (loss_of(model, comm.rank, comm.size) + (scale * model[2].weight).sum()).backward()
            if t != step:
                optimizer.step()
                continue
            want = rf"gradient of 2\.weight is not finite on rank 1 in step {step};"
            for _ in range(2):  # also who tries again
                with pytest.raises(rx.NonFiniteError, match=want) as error:
                    optimizer.step()
            assert all_the_same(comm, error)
            assert torch.equal(numbers(model), before)
        sync.check()
        assert sync.stats().skipped == 0


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("algorithm", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_law_a_skipped_step_never_was(comm, algorithm, bad):
    """Parameters, momentum, second moments and what the codec owes: bit for bit."""
    models = []
    for spoilt in (True, False):
        model = perceptron()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
        guard = rx.NonFinite.SKIP
        with rx.attach(model, optimizer, algorithm, comm=comm, nonfinite=guard, **SMALL) as sync:
            for t in range(5):
                if t in (0, 2) and not spoilt:
                    continue
                optimizer.zero_grad()
                scale = bad if t in (0, 2) and comm.rank == comm.size - 1 else 1.0
                loss = loss_of(model, comm.rank, comm.size)
                (loss + 1e-3 * (scale * model[2].weight).sum()).backward()
                optimizer.step()
                assert torch.isfinite(numbers(model)).all()
            assert sync.stats().skipped == 2 * spoilt
            sync.check()
        models.append(model)
    assert torch.equal(numbers(models[0]), numbers(models[1]))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("algorithm", CODECS.values(), ids=CODECS)
def test_pass_lets_it_through_to_all_ranks_alike(comm, algorithm):
    model, optimizer = weight_of([1.0, 2.0, 3.0])
    with rx.attach(model, optimizer, algorithm, comm=comm):
        push(model, [1.0, float("nan") if comm.rank else 1.0, 1.0])
        optimizer.step()
        got = [str(w) for w in comm.mpi.allgather(model.w.tolist())]
        assert got[0] == got[1]
    if algorithm == rx.SGD():
        assert got[0] == "[0.0, nan, 2.0]"


@pytest.mark.ranks(2)
def test_half_precision_whose_sum_overflows_is_finite(comm):
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm, nonfinite=rx.NonFinite.RAISE) as sync:
        for _ in range(2):
            optimizer.zero_grad()
            (model.w * 4e4).sum().backward()
            sync.wait()
            assert model.w.grad.tolist() == [4e4] * 4  # 40000 is a number of half precision
            optimizer.step()


@pytest.mark.ranks(2, 3)
def test_check_names_what_differs_and_where(comm):
    model, optimizer = weight_of([1.0, 2.0])
    model.thin = nn.Parameter(torch.zeros(0))
    optimizer.add_param_group({"params": [model.thin]})
    with rx.attach(model, optimizer, rx.SGD(), comm=comm) as sync:
        sync.check()
        last = comm.size - 1
        with torch.no_grad():
            model.w[1] += 1e-7 * 2.5 if comm.rank == last else 0.0  # one ulp of 2
        with pytest.raises(rx.RelaxError, match=rf"parameter w differs .* ranks \[{last}\]"):
            sync.check()
        with torch.no_grad():
            model.w.fill_(float("nan"))
        sync.check()


@pytest.mark.ranks(2)
def test_stats_by_hand(comm):
    # Two ranks exchange 1000 float32: half of them to the owner, half of the means back.
    model, optimizer = weight_of([0.0] * 1000)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm) as sync:
        assert sync.stats()[:2] == (0, 0.0)
        for _ in range(3):
            optimizer.zero_grad()
            push(model, [1.0] * 1000)
            optimizer.step()
        stats = sync.stats()
    assert (stats.steps, stats.buckets, stats.skipped) == (3, 1, 0)
    assert stats.payload_bytes == 4000
    assert 0 <= stats.overlap <= 1
    assert 0 <= stats.waited < 1
    assert stats.messages >= 2
    assert stats.header_bytes > 0


def test_overlap_is_what_compute_hides():
    """On a simulated network: backward after the first bucket takes longer than its exchange."""

    def program(seconds):
        with rx.Comm.world() as comm:
            model, optimizer = weight_of([0.0] * 1000)
            model.v = nn.Parameter(torch.zeros(10))
            optimizer.add_param_group({"params": [model.v]})
            with rx.attach(model, optimizer, rx.SGD(), comm=comm, **SINGLE) as sync:
                model.v.register_post_accumulate_grad_hook(lambda _: comm.compute(seconds))
                for _ in range(5):
                    optimizer.zero_grad()
                    (model.w.sum() + model.v.sum()).backward()
                    optimizer.step()
                return sync.stats()

    network = rx.Network(latency=1e-3, bandwidth=1e8)
    for seconds, low, high in ((0.0, 0.0, 0.5), (1.0, 0.9, 1.0)):
        for stats in rx.SimulatedWorld(2, network=network).run(program, seconds):
            assert low <= stats.overlap <= high


@pytest.mark.ranks(2, 3)
def test_a_rank_that_leaves_a_bad_step_out_by_itself_is_told_too(comm):
    model, optimizer = weight_of([1.0])
    sync = rx.attach(model, optimizer, rx.SGD(), comm=comm, nonfinite=rx.NonFinite.RAISE)
    push(model, [float("nan") if comm.rank == 1 else 1.0])
    with pytest.raises(rx.NonFiniteError, match="of w is not finite on rank 1 in step 0") as error:
        if comm.rank != 1:
            optimizer.step()
        optimizer.zero_grad()
        push(model, [1.0])
    assert all_the_same(comm, error)
    optimizer.zero_grad()
    sync.detach()
