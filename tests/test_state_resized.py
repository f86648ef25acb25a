"""A checkpoint loaded by another number of ranks: what is common stays, the rest begins anew."""

import logging

import numpy as np
import pytest

import relaxmpi as rx

torch = pytest.importorskip("torch")


def grads(rank, t):
    return np.random.default_rng((rank, t)).standard_normal(64).astype("f4")


def saved(folder, n, spec, own=False):
    def program():
        with rx.Comm.world() as comm:
            x = np.full(64, comm.rank if own else 1, "f4")
            memory, rng = rx.ErrorFeedback(rx.OneBit()), np.random.default_rng(comm.rank)
            opt = spec.bind(comm, x, lr=0.1, name="x")
            for t in range(4):
                opt.step(grads(comm.rank, t))
                rx.allreduce(comm, grads(comm.rank, t), op=rx.MEAN, codec=memory, name="by hand")
            rx.save(folder, comm, x=x, opt=opt, memory=memory, rng=rng, mine=comm.rank, n=comm.size)
            return x, opt.state_dict()

    return rx.SimulatedWorld(n).run(program)


@pytest.mark.parametrize(("old", "new"), [(1, 3), (4, 2), (2, 3), (3, 1)])
@pytest.mark.parametrize(
    "spec",
    [
        rx.QSGD(codec=rx.OneBit(), feedback=True, rule=rx.SGD(momentum=0.9)),
        rx.OneBitAdam(freeze=2),
        rx.DiLoCo(every=3, delay=2, codec=rx.Quantizer(bits=4), feedback=True),
    ],
    ids=["sign", "1-bit adam", "diloco"],
)
def test_law_residuals_are_reset_the_rest_is_kept_with_one_warning(
    spec, old, new, tmp_path, caplog
):
    before = saved(tmp_path, old, spec)

    def program():
        with rx.Comm.world() as comm:
            x = np.zeros(64, "f4")
            memory, rng = rx.ErrorFeedback(rx.OneBit()), np.random.default_rng(77)
            opt = spec.bind(comm, x, lr=0.5, name="x")
            found = rx.load(tmp_path, comm, x=x, opt=opt, memory=memory, rng=rng)
            if old > 1:
                assert rng.random() == np.random.default_rng(77).random()
                assert not memory.residual("worker")
            assert (found["n"], found["mine"]) == (old, comm.rank % old)
            start, state = x.copy(), opt.state_dict()
            assert comm.steps == ({"by hand": 4} if old > 1 else {})
            for t in range(4, 8):
                opt.step(grads(comm.rank, t))
                rx.allreduce(comm, grads(comm.rank, t), op=rx.MEAN, codec=memory)
            return start, state, x

    with caplog.at_level(logging.WARNING, "relaxmpi"):
        after = rx.SimulatedWorld(new).run(program)
    mean = np.mean([x.astype("f8") for x, _ in before], axis=0).astype("f4")
    for start, state, _ in after:
        assert start.tobytes() == mean.tobytes(), "parameters are equal, or averaged"
        assert (state.get("t", 4), state["lr"]) == (4, 0.1)
        if "m" not in state:
            assert not state["owed"]["residuals"]
        for key in ("theta", "b", "d", "m", "v"):
            if key in state:
                np.testing.assert_array_equal(state[key], before[0][1][key])
        if "rule" in state and "theta" not in state:
            np.testing.assert_array_equal(state["rule"]["v"], before[0][1]["rule"]["v"])
    if "theta" not in after[0][1]:
        assert len({x.tobytes() for *_, x in after}) == 1
    said = [r.getMessage() for r in caplog.records if r.name == "relaxmpi"]
    assert len(said) == 1
    assert f"saved by {old} ranks and is loaded by {new}" in said[0]
    if old > 1:
        assert "memory: what each rank had for itself reset" in said[0]
        assert "rng: left as it is" in said[0]


def test_modules_that_differ_become_their_mean(tmp_path):
    def model_of(rank):
        torch.manual_seed(rank)
        return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).bfloat16()

    def save():
        with rx.Comm.world() as comm:
            rx.save(tmp_path, comm, model=model_of(comm.rank))

    def load():
        with rx.Comm.world() as comm:
            model = model_of(9)
            rx.load(tmp_path, comm, model=model)
            return model.state_dict()

    rx.SimulatedWorld(3).run(save)
    want = [model_of(r)[0].weight.double() for r in range(3)]
    for state in rx.SimulatedWorld(2).run(load):
        assert torch.equal(state["0.weight"], (sum(want) / 3).bfloat16())
        assert state["1.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize(("old", "new"), [(2, 3), (1, 2), (3, 1)])
@pytest.mark.parametrize(
    "spec",
    [
        rx.QSGD(codec=rx.OneBit(), feedback=True),
        rx.DiLoCo(every=2),
        rx.LocalSGD(every=2),
        rx.OSGP(tau=2, send_every=1),
        rx.OSGP(tau=None),
        rx.ADPSGD(),
        rx.Decentralized(order=rx.Order.COMBINE_WHILE_ADAPT),
        rx.Choco(),
        rx.LowPrecisionDecentralized(),
        rx.SlowMo(rx.OSGP(tau=1), every=3),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_an_attached_loop_goes_on_with_another_number_of_ranks(spec, old, new, tmp_path):
    def program(load):
        with rx.Comm.world() as comm:
            torch.manual_seed(0)
            model = torch.nn.Linear(5, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with rx.attach(model, optimizer, spec, comm=comm, bucket_bytes=8) as sync:
                things = {"model": model, "optimizer": optimizer, "sync": sync}
                begun = None
                if load:
                    rx.load(tmp_path, comm, **things)
                    begun = model.weight.detach().clone()
                for t in range(4):
                    optimizer.zero_grad()
                    torch.manual_seed(t + 10 * comm.rank)
                    model(torch.randn(3, 5)).square().sum().backward()
                    optimizer.step()
                if not load:
                    rx.save(tmp_path, comm, **things)
                with sync.averaged():
                    mean = model.weight.detach().clone()
                spread = sync.spread()
            return begun, mean, model.weight.detach(), spread

    before = rx.SimulatedWorld(old).run(program, False)
    after = rx.SimulatedWorld(new).run(program, True)
    common = isinstance(spec, (rx.QSGD, rx.DiLoCo, rx.LocalSGD))
    for begun, mean, end, spread in after:
        if old > 1 and not isinstance(spec, (rx.OSGP, rx.SlowMo)):  # there x / w, not y / w
            np.testing.assert_allclose(begun, before[0][1], rtol=0, atol=1e-6)
        assert torch.equal(begun, after[0][0]), "all begin with the mean"
        assert torch.equal(mean, after[0][1])
        assert mean.isfinite().all()
        assert not torch.equal(mean, begun), "it goes on"
        assert spread < 1e-6 or not common
        assert torch.equal(end, after[0][2]) or not common
