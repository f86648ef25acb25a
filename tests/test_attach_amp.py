"""`attach` with GradScaler: `sync.wait()` before what looks at gradients, and inf steps."""

import numpy as np
import pytest
from loops import SMALL, assert_close, copies, loss_of, nn, perceptron, sgd_of, torch, weight_of

import relaxmpi as rx

RULES = {
    "sgd": sgd_of,
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "fused": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, fused=True),  # unscales itself
}


def inf_on(t, rank, size):
    return t in (0, 3) and rank == size - 1


def train(comm, model, optimizer, sync, scaler, t, ranks, clip):
    optimizer.zero_grad()
    for r in ranks:
        loss = loss_of(model, r, comm.size) / len(ranks)
        scale = float("inf") if inf_on(t, r, comm.size) else 0.0
        scaler.scale(loss + (model[2].bias * scale).sum()).backward()
    if sync is not None:
        sync.wait()
    if clip:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("guard", [rx.NonFinite.PASS, rx.NonFinite.SKIP])
def test_law_scaled_gradients_are_those_of_one_process(comm, rule, clip, guard):
    """Also where one rank's gradient is infinite: all leave the step out and halve the scale."""
    (model, optimizer), (alone, theirs) = copies(perceptron(), rule)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
    with rx.attach(model, optimizer, rx.SGD(), comm=comm, nonfinite=guard, **SMALL) as sync:
        for t in range(6):
            train(comm, model, optimizer, sync, scalers[0], t, [comm.rank], clip)
            train(comm, alone, theirs, None, scalers[1], t, range(comm.size), clip)
            assert scalers[0].get_scale() == scalers[1].get_scale()
        sync.check()
        assert scalers[0].get_scale() == 2.0**8
    assert_close(model, alone, 2e-6 if rule is sgd_of else 2e-4)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("inf", [True, False])
def test_without_wait_every_rank_gets_an_error(comm, unscale, rule, inf):
    model = perceptron()
    optimizer = rule(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    sync = rx.attach(model, optimizer, rx.SGD(), comm=comm, **SMALL)
    scale = float("inf") if inf and comm.rank == 0 else 1.0
    for _ in range(2):
        scaler.scale(loss_of(model, comm.rank, comm.size) * scale).backward()
        with pytest.raises(rx.RelaxError, match=r"call sync\.wait\(\)"):
            scaler.unscale_(optimizer) if unscale else scaler.step(optimizer)
        sync.wait()
        optimizer.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    sync.detach()


class Deaf(rx.Identity):
    """A codec that does not pass on what is not finite."""

    def encode(self, x, payload, **where):
        super().encode(np.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0), payload, **where)


@pytest.mark.ranks(2)
def test_every_codec_lets_a_grad_scaler_see_inf(comm):
    """Also those that might leave the one bad number out, or clip it."""
    bad = torch.tensor([float("inf") if comm.rank else 1.0, *[1e3] * 7])
    for codec in (rx.OneBit(), rx.MinMaxUInt8(), rx.Quantizer(bits=4), rx.TopK(0.25), Deaf()):
        model, optimizer = weight_of([0.0] * 8)
        algorithm, guard = rx.QSGD(codec=codec, feedback=True), rx.NonFinite.SKIP
        with rx.attach(model, optimizer, algorithm, comm=comm, nonfinite=guard) as sync:
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
            scaler.scale((model.w * bad).sum()).backward()
            sync.wait()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 1.0, codec
            assert torch.equal(model.w, torch.zeros(8))


@pytest.mark.ranks(2)
def test_what_a_codec_owes_survives_an_inf_step_with_skip(comm):
    model, optimizer = weight_of([1.0, 2.0])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    algorithm, guard = rx.QSGD(bits=1, feedback=True), rx.NonFinite.SKIP
    with rx.attach(model, optimizer, algorithm, comm=comm, nonfinite=guard) as sync:
        for t in range(4):
            optimizer.zero_grad()
            bad = float("inf") if t == 1 and comm.rank else 1.0
            scaler.scale((model.w * bad).sum()).backward()
            sync.wait()
            scaler.step(optimizer)
            scaler.update()
        assert model.w.tolist() == [-2.0, -1.0]
        assert sync.stats().skipped == 1
        assert scaler.get_scale() == 1.0


@pytest.mark.ranks(1, 2, 3)
def test_inside_join_where_the_last_step_is_left_out(comm):
    model, optimizer = weight_of([1.0])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    count = 1 + comm.rank
    with rx.attach(model, optimizer, rx.SGD(), comm=comm) as sync:
        with sync.join(scaler):
            for t in range(count):
                optimizer.zero_grad()
                bad = float("inf") if t == comm.size - 1 else 1.0  # the last rank's last batch
                scaler.scale((model.w * bad).sum()).backward()
                sync.wait()
                scaler.step(optimizer)
                scaler.update()
        assert model.w.item() == 2.0 - comm.size
        # A rank's own scaler saw no inf where it had no batch: the one with most steps decides.
        assert len(set(comm.mpi.allgather(scaler.get_scale()))) == 1
        sync.check()
