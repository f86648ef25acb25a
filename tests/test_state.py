"""Save and resume: going on equals never having stopped, for every algorithm and thing."""

import random
from collections import Counter, OrderedDict

import numpy as np
import pytest

import relaxmpi as rx

torch = pytest.importorskip("torch")

MOMENTUM = rx.SGD(momentum=0.9, nesterov=True)
SPECS = {
    "sgd": rx.SGD(),
    "momentum": MOMENTUM,
    "qsgd4": rx.QSGD(bits=4, rule=MOMENTUM),
    "qsgd2 feedback": rx.QSGD(bits=2, feedback=True),
    "sign": rx.QSGD(codec=rx.OneBit(), feedback=True, rule=MOMENTUM),
    "bytegrad": rx.ByteGrad(),
    "top-k": rx.QSGD(codec=rx.TopK(0.1), feedback=True),
    "adamw": rx.AdamW(),
    "1-bit adam": rx.OneBitAdam(freeze=5),
    "local sgd": rx.LocalSGD(every=4, start=2, rule=MOMENTUM),
    "diloco": rx.DiLoCo(every=4, rule=rx.AdamW()),
    "diloco on its way": rx.DiLoCo(
        every=3, delay=2, alpha=0.5, codec=rx.Quantizer(bits=4), feedback=True
    ),
    "sgp": rx.SGP(rule=MOMENTUM),
    "osgp on its way": rx.OSGP(tau=2, send_every=2, codec=rx.Quantizer(bits=8)),
    "d-psgd": rx.Decentralized(interval=2, rule=MOMENTUM),
    "d-psgd on its way": rx.Decentralized(order=rx.Order.COMBINE_WHILE_ADAPT),
    "choco": rx.Choco(),
    "bagua's ring": rx.LowPrecisionDecentralized(rule=MOMENTUM),
    "slow momentum": rx.SlowMo(rx.OSGP(tau=1), every=4),
}
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
BOUNDARIES = (0, 1, 3, 5, 8)
LAST = 11


def grads(rank, t):
    return np.random.default_rng((rank, t)).standard_normal(101).astype("f4")


def on_arrays(comm, spec, folder, kind=np.asarray, boundaries=BOUNDARIES):
    """Train without a stop, and from every checkpoint; return the x's of the end."""

    def train(x, opt, begin, end, save=False):
        for t in range(begin, end):
            if save and t in boundaries:
                rx.save(folder / str(t), comm, x=x, opt=opt, t=t)
            opt.step(kind(grads(comm.rank, t)))
        if end == LAST:
            opt.finish()
        return np.asarray(x).tobytes()

    x = kind(np.ones(101, "f4"))
    ends = [train(x, spec.bind(comm, x, lr=0.1, name="x"), 0, LAST, save=True)]
    for t in boundaries:
        x = kind(np.zeros(101, "f4"))
        opt = spec.bind(comm, x, lr=0.5, name="x")
        train(x, opt, 20, 20 + t % 3)  # it has been elsewhere
        found = rx.load(folder / str(t), comm, x=x, opt=opt)
        assert found == {"t": t}
        ends.append(train(x, opt, t, LAST))
    return ends


@pytest.mark.parametrize("n", [1, 3])
@specs
def test_law_resumed_equals_never_stopped_bit_for_bit(spec, n, tmp_path):
    def program():
        with rx.Comm.world() as comm:
            return on_arrays(comm, spec, tmp_path)

    for ends in rx.SimulatedWorld(n).run(program):
        assert len(set(ends)) == 1


@pytest.mark.parametrize("spec", [rx.OSGP(tau=None), rx.ADPSGD()], ids=repr)
def test_law_what_asynchronous_ranks_have_on_their_way_is_saved_too(spec, tmp_path):
    """They have no order that could be repeated, but no part of the mean may be lost."""

    def program():
        with rx.Comm.world() as comm:
            x = np.ones(101, "f4")
            opt = spec.bind(comm, x, lr=0.1)
            for t in range(20):
                comm.compute(1e-3 * (1 + comm.rank))
                opt.step(grads(comm.rank, t))
            rx.save(tmp_path, comm, x=x, opt=opt)
            mean = opt.mean().copy()
            for t in range(5 + comm.rank):
                opt.step(grads(comm.rank, t))
            rx.load(tmp_path, comm, x=x, opt=opt)
            again = opt.mean().copy()
            y = np.zeros(101, "f4")
            other = spec.bind(comm, y, lr=0.1)
            rx.load(tmp_path, comm, x=y, opt=other)
            fresh = other.mean().copy()
            opt.finish()
            other.finish()
            return mean.tobytes(), again.tobytes(), fresh.tobytes()

    network = rx.Network(latency=3e-3)
    assert len({m for ms in rx.SimulatedWorld(3, network=network).run(program) for m in ms}) == 1


def common(comm, tmp_path):
    """The folder of rank 0."""
    return comm.mpi.bcast(tmp_path)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", ["sign", "diloco on its way"])
def test_law_on_real_ranks_too(comm, name, tmp_path):
    folder = common(comm, tmp_path)
    ends = on_arrays(comm, SPECS[name], folder, torch.as_tensor, boundaries=(8,))
    assert len(set(ends)) == 1


ATTACHED = {
    "sgd": rx.SGD(),
    "qsgd4": rx.QSGD(bits=4),
    "sign": rx.QSGD(codec=rx.OneBit(), feedback=True),
    "1-bit adam": rx.OneBitAdam(freeze=3),
    "osgp": rx.OSGP(tau=2, send_every=1),
    "choco": rx.Choco(),
    "local sgd": rx.LocalSGD(every=3, start=1),
    "diloco": rx.DiLoCo(every=3, delay=1, alpha=0.5, codec=rx.Quantizer(bits=8), feedback=True),
}


class Training:
    """A loop with everything that has a state."""

    def __init__(self, comm, spec, seed):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(12, 9), torch.nn.BatchNorm1d(9), torch.nn.Tanh(), torch.nn.Linear(9, 4)
        )
        onebit = isinstance(spec, rx.OneBitAdam)
        parameters = self.model.parameters()
        self.optimizer = (
            rx.OneBitAdamOptimizer(parameters, spec, comm=comm, lr=0.01)
            if onebit
            else torch.optim.AdamW(parameters, lr=0.01)
        )
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5, 5], 0.5)
        self.sync = rx.attach(
            self.model, self.optimizer, spec, comm=comm, bucket_bytes=200, first_bucket_bytes=100
        )
        self.places = torch.Generator().manual_seed(seed + comm.rank)
        self.numpy, self.python = np.random.default_rng(seed), random.Random(seed)
        self.weighs = not (spec.mixes or onebit)

    def things(self):
        return vars(self)

    def step(self):
        if self.weighs:
            self.sync.weight = 1.0 + self.python.random()
        self.optimizer.zero_grad()
        x = torch.randn(6, 12, generator=self.places) + self.numpy.standard_normal()
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()

    def end(self):
        self.sync.detach()
        numbers = [t.numpy().tobytes() for t in self.model.state_dict().values()]
        return numbers, self.scheduler.get_last_lr(), self.python.random()


def attached(comm, spec, folder):
    training = Training(comm, spec, seed=comm.rank)
    for t in range(8):
        if t in (0, 1, 3, 6):
            rx.save(folder / str(t), comm, **training.things())
        training.step()
    ends = [training.end()]
    for t in (0, 1, 3, 6):
        training = Training(comm, spec, seed=9)
        for _ in range(t % 2):
            training.step()
        rx.load(folder / str(t), comm, **training.things())
        for _ in range(t, 8):
            training.step()
        ends.append(training.end())
    return ends


@pytest.mark.parametrize("spec", ATTACHED.values(), ids=ATTACHED)
def test_law_an_attached_loop_resumes_bit_for_bit(spec, tmp_path):
    def program():
        with rx.Comm.world() as comm:
            return attached(comm, spec, tmp_path)

    for ends in rx.SimulatedWorld(2).run(program):
        assert all(end == ends[0] for end in ends)


@pytest.mark.ranks(1, 3)
def test_law_an_attached_loop_resumes_on_real_ranks(comm, tmp_path):
    ends = attached(comm, ATTACHED["sign"], common(comm, tmp_path))
    assert all(end == ends[0] for end in ends)


def test_calls_by_hand_resume_with_the_same_random_numbers(tmp_path):
    """The step of a codec's numbers is counted by the Comm, which is saved by itself."""

    def program():
        with rx.Comm.world() as comm:
            other, codec = comm.dup(), rx.Quantizer(bits=2)

            def go():
                x = np.linspace(-1, 1, 50)
                for c in (comm, other):
                    rx.allreduce(c, x, op=rx.MEAN, codec=codec, name="x")
                return x.tobytes()

            go()
            rx.save(tmp_path, comm, other=other)
            first, second = go(), go()
            assert first != second
            rx.load(tmp_path, comm, other=other)
            assert [go(), go()] == [first, second]
            other.close()

    rx.SimulatedWorld(2).run(program)


VALUES = {
    "none": None,
    "numbers": [0, -1, 10**40, 1.5, -0.0, 5e-324, float("inf"), float("-inf"), True],
    "text": "é\ud800\n\0",
    "keys": {("worker", 0, 5): 1, 3: (), None: b"\x00\xff", 1.5: {"a": []}, "1": {}},
    "ordered": OrderedDict(b=1, a=2),
    "counter": Counter("abca"),
    "scalars": (np.float32(0.1), np.int8(-3), np.bool_(True), np.complex64(1j)),
    "dtypes": (np.dtype("f2"), torch.bfloat16),
    "arrays": {
        "bf16": torch.arange(6).bfloat16().reshape(2, 3),
        "fp8": torch.arange(6).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3.5),
        "empty": np.empty((0, 3), "i2"),
        "complex": np.array([1j, 2.0]),
        "complex torch": torch.tensor([[1j], [2.0]]).conj(),
        "strided": np.arange(12).reshape(3, 4).T[::2],
        "big endian": np.arange(3, dtype=">i4"),
        "bool": torch.tensor([True, False]),
    },
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        wide = torch.complex128 if a.is_complex() else torch.float64
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a.to(wide), b.to(wide))
    if isinstance(a, np.ndarray):
        native = a.dtype.newbyteorder("=")
        return (native, a.shape) == (b.dtype, b.shape) and np.array_equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


def test_values_come_back_exactly(tmp_path):
    def program():
        with rx.Comm.world() as comm:
            values = {**VALUES, "mine": comm.rank, "nan": float("nan")}
            rx.save(tmp_path, comm, **values)
            found = rx.load(tmp_path, comm)
            assert found.keys() == values.keys()
            for name, value in values.items():
                assert same(value, found[name]), name

    rx.SimulatedWorld(2).run(program)


@pytest.mark.parametrize(
    "thing",
    [lambda: 0, {1, 2}, np.array(["a"]), object(), [[1j]]],
    ids=["function", "set", "text", "object", "complex"],
)
def test_what_has_no_safe_form_is_refused_by_name(thing, tmp_path):
    def program():
        with rx.Comm.world() as comm:
            with pytest.raises(rx.CheckpointError, match=r"things\.a"):
                rx.save(tmp_path, comm, things={"a": thing})
            endless = []
            endless.append(endless)
            with pytest.raises(rx.CheckpointError, match="contains itself"):
                rx.save(tmp_path, comm, endless=endless)
            with pytest.raises(ValueError, match="name __metadata__ is taken"):
                rx.save(tmp_path, comm, __metadata__=1)
            with pytest.raises(ValueError, match="keep"):
                rx.save(tmp_path, comm, keep=0)

    rx.SimulatedWorld(2).run(program)
    assert not list(tmp_path.iterdir())


def test_what_ranks_have_in_common_is_written_once(tmp_path):
    tied = torch.ones(1000)

    def program():
        with rx.Comm.world() as comm:
            equal, own = np.ones(10_000, "f4"), np.full(500, comm.rank, "f4")
            both = {"a": tied, "b": tied}
            path = rx.save(tmp_path, comm, equal=equal, own=own, both=both, step=3)
            sizes = {file.name: file.stat().st_size for file in path.iterdir()}
            found = rx.load(tmp_path, comm, equal=equal, own=own)
            assert found["both"]["b"].sum() == 1000
            assert (own == comm.rank).all()
            return sizes

    sizes = rx.SimulatedWorld(3).run(program)[0]
    assert 44_000 < sizes["shared.safetensors"] < 46_000
    for rank in range(3):
        assert 2_000 < sizes[f"rank-0000{rank}.safetensors"] < 2_600
    assert len(sizes) == 5
    rx.SimulatedWorld(3).run(lambda: rx.save(tmp_path / "equal", rx.Comm.world(), x=np.ones(3)))
    names = [file.name for file in (tmp_path / "equal" / "00000001").iterdir()]
    assert sorted(names) == ["index.json", "shared.safetensors"]


def test_the_newest_is_loaded_the_oldest_are_removed(tmp_path):
    def program():
        with rx.Comm.world() as comm:
            assert rx.load(tmp_path / "none", comm, missing_ok=True) == {}
            with pytest.raises(rx.CheckpointError, match="there is no checkpoint"):
                rx.load(tmp_path, comm)
            for step in range(12):
                path = rx.save(tmp_path, comm, keep=3 if step > 5 else None, step=step)
                assert rx.load(tmp_path, comm) == {"step": step}
            assert rx.load(path.parent / "00000011", comm) == {"step": 10}
            with pytest.raises(rx.CheckpointError, match="itself a checkpoint"):
                rx.save(path, comm, step=0)

    rx.SimulatedWorld(2).run(program)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["00000010", "00000011", "00000012"]


def test_attach_saves_between_steps_only(tmp_path):
    def program():
        with rx.Comm.world() as comm:
            training = Training(comm, rx.SGD(), 0)
            training.step()
            training.model(torch.ones(3, 12)).sum().backward()
            for _ in range(2):
                with pytest.raises(rx.CheckpointError, match="between backward and step"):
                    rx.save(tmp_path, comm, **training.things())
                training.sync.wait()
            training.optimizer.step()
            rx.save(tmp_path, comm, **training.things())
            training.end()

    rx.SimulatedWorld(2).run(program)


def test_mixed_parameters_are_not_saved_without_what_their_algorithm_keeps(tmp_path):
    def program():
        with rx.Comm.world() as comm:
            training = Training(comm, rx.OSGP(), 0)
            training.step()
            things = {"model": training.model, "optimizer": training.optimizer}
            with pytest.raises(ValueError, match=r"optimizer is attached .* as sync=sync"):
                rx.save(tmp_path, comm, **things)
            rx.save(tmp_path, comm, model=training.model)
            with training.sync.averaged():
                rx.save(tmp_path, comm, **things)
            rx.save(tmp_path, comm, **things, sync=training.sync)
            training.sync.detach()
            rx.save(tmp_path, comm, **things)

    rx.SimulatedWorld(2).run(program)


def test_law_local_gradients_are_no_part_of_what_is_saved(tmp_path):
    """Where parameters are mixed nothing of a backward is on its way: it is done again."""

    def program():
        with rx.Comm.world() as comm:
            whole, resumed = (Training(comm, rx.OSGP(), 0) for _ in range(2))
            whole.step()
            whole.model(torch.ones(3, 12)).sum().backward()
            buffers = [t.clone() for t in whole.model.buffers()]
            rx.save(tmp_path / "between", comm, **whole.things())
            rx.load(tmp_path / "between", comm, **resumed.things())
            assert all(map(torch.equal, resumed.model.buffers(), buffers))
            ends = []
            for training in (whole, resumed):
                training.step()
                ends.append(training.end())
            assert ends[0] == ends[1]

    rx.SimulatedWorld(2).run(program)


@pytest.mark.ranks(2, timeout=30)
def test_files_may_take_longer_than_a_call_may_wait(tmp_path, monkeypatch, caplog):
    from relaxmpi.primitives.checkpoint import index, save

    with rx.Comm.world() as comm:
        folder = common(comm, tmp_path)
    fsync, sha256 = save.os.fsync, index.sha256

    class Slow:
        def __init__(self):
            self.digest = sha256()
            self.hexdigest = self.digest.hexdigest

        def update(self, data):
            save.time.sleep(0.15)
            self.digest.update(data)

    monkeypatch.setattr(save, "CHUNK", 10_000)
    monkeypatch.setattr(index, "CHUNK", 10_000)
    monkeypatch.setattr(save, "_FLUSH", 10_000)
    monkeypatch.setattr(index, "sha256", Slow)
    monkeypatch.setattr(save.os, "fsync", lambda fd: save.time.sleep(0.15) or fsync(fd))
    with rx.Comm.world(timeout=1.0) as comm, caplog.at_level("INFO", "relaxmpi"):
        x = np.arange(30_000 if comm.rank == 0 else 5, dtype="f4")
        rx.save(folder, comm, shared=np.ones(10_000, "f4"), x=x)
        y = np.zeros_like(x)
        rx.load(folder, comm, shared=np.zeros(10_000, "f4"), x=y)
        assert (x == y).all()
    said = [r.getMessage() for r in caplog.records if "written by rank 0" in r.getMessage()]
    assert bool(said) == (comm.rank == 0)


@pytest.mark.ranks(2)
def test_the_state_of_another_algorithm_is_refused_before_anything_changes(comm, tmp_path):
    specs = [
        rx.OSGP(),
        rx.OSGP(codec=rx.Quantizer(bits=8)),
        rx.SlowMo(rx.OSGP()),
        rx.SlowMo(rx.LocalSGD(every=2)),
        rx.Decentralized(),
        rx.Choco(),
    ]
    for k, saved in enumerate(specs):
        x = np.ones(7)
        folder = common(comm, tmp_path) / str(k)
        with_ = {"x": x, "opt": saved.bind(comm, x, lr=0.1, name="saved")}
        rx.save(folder, comm, **with_)
        for other in specs:
            if other is saved:
                continue
            y = np.full(7, 9.0)
            with pytest.raises(rx.CheckpointError, match="is state of"):
                rx.load(folder, comm, x=y, opt=other.bind(comm, y, lr=0.1))
            assert (y == 9).all()


def test_the_state_of_another_rule_is_refused_before_anything_changes(tmp_path):
    def program():
        with rx.Comm.world() as comm:
            for spec in (rx.Decentralized, rx.OSGP, rx.QSGD):
                x = np.ones(3)
                opt = spec(rule=rx.SGD(momentum=0.9)).bind(comm, x, lr=0.1)
                rx.save(tmp_path, comm, x=x, opt=opt)
                other = spec(rule=rx.AdamW()).bind(comm, x, lr=0.1)
                x[:] = 9.0
                with pytest.raises(rx.CheckpointError, match=r"state of \w+ in it, .* AdamW here"):
                    rx.load(tmp_path, comm, x=x, opt=other)
                assert (x == 9).all()

    rx.SimulatedWorld(2).run(program)
