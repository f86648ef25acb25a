"""Damaged, forged and foreign checkpoints: the same named error on all ranks, and no code runs."""

import json
import os
import pickle
import shutil
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

import relaxmpi as rx

torch = pytest.importorskip("torch")


class Checkpoint:
    """A good checkpoint of two ranks, to be spoilt."""

    def __init__(self, folder):
        self.folder = folder / "00000001"
        self.shared = self.folder / "shared.safetensors"
        self.rank1 = self.folder / "rank-00001.safetensors"
        self.index = self.folder / "index.json"
        self.outside = folder.parent / "outside"

    def told(self):
        return json.loads(self.index.read_text())

    def tell(self, **changes):
        self.index.write_text(json.dumps({**self.told(), **changes}))

    def seal(self):
        """Forge the index, so that it tells what the files are now."""
        files = {
            name: {"size": len(data), "sha256": sha256(data).hexdigest()}
            for name in self.told()["files"]
            for data in [(self.folder / name).read_bytes()]
        }
        self.tell(files=files)

    def replace(self, data):
        self.shared.write_bytes(data)
        self.seal()

    def header(self, change):
        """Forge the header of the shared file."""
        data = self.shared.read_bytes()
        size = int.from_bytes(data[:8], "little")
        told = json.loads(data[8 : 8 + size])
        told = change(told) or told
        text = told if isinstance(told, bytes) else json.dumps(told).encode()
        self.replace(len(text).to_bytes(8, "little") + text + data[8 + size :])

    def entry(self, **changes):
        self.header(lambda told: told["x"].update(changes))

    def thing(self, change):
        """Forge what the shared file says about its things."""

        def within(told):
            things = json.loads(told["__metadata__"]["relaxmpi"])
            things = change(things) or things
            text = things if isinstance(things, str) else json.dumps(things)
            told["__metadata__"]["relaxmpi"] = text

        self.header(within)

    def value(self, tree):
        self.thing(lambda things: things["value"].update(tree=tree))

    def link(self, path):
        shutil.move(path, self.outside)
        path.symlink_to(self.outside)

    def pipe(self, path):
        path.unlink()
        os.mkfifo(path)


BOOM = "/tmp/relaxmpi-test-a-pickle-ran"


class Bomb:
    def __reduce__(self):
        return os.mkdir, (BOOM,)


def nested(depth):
    return "[" * depth + "]" * depth


def torch_file(c):
    torch.save({"x": torch.ones(3)}, c.shared)
    c.seal()


DAMAGED = {
    "a missing file": (lambda c: c.shared.unlink(), "No such file"),
    "a file that only rank 1 needs": (lambda c: c.rank1.unlink(), r"rank-00001.*No such.*rank 1"),
    "a missing index": (lambda c: c.index.unlink(), "index.json: No such file"),
    "a shorter file": (lambda c: os.truncate(c.rank1, 99), r"rank-00001.*99 bytes, not"),
    "a flipped bit": (
        lambda c: c.shared.write_bytes(c.shared.read_bytes()[:-1] + b"\x7f"),
        "SHA-256 is another",
    ),
    "an index cut off": (lambda c: os.truncate(c.index, 50), "index.json: it is not JSON"),
    "an empty index": (lambda c: os.truncate(c.index, 0), "index.json: it is not JSON"),
}
HOSTILE = {
    "a pickle": (lambda c: c.replace(pickle.dumps(Bomb())), "looks like a pickle"),
    "a pickle as index": (lambda c: c.index.write_bytes(pickle.dumps(Bomb())), "not JSON"),
    "a file of torch.save": (torch_file, "looks like a pickle"),
    "a newer version": (lambda c: c.tell(version=2, more=1), r"version 2 .*which reads 1"),
    "unknown keys": (lambda c: c.tell(run="rm -rf"), r"unknown or missing keys.*'run'"),
    "a path upwards": (
        lambda c: c.tell(files={**c.told()["files"], "../../outside": {}}),
        "2 ranks cannot have 3",
    ),
    "a path upwards as only file": (
        lambda c: c.tell(files={"../shared.safetensors": {}}),
        r"files that should not.*'../shared",
    ),
    "an absolute path": (
        lambda c: c.tell(
            files={("/etc/passwd" if "1" in n else n): s for n, s in c.told()["files"].items()}
        ),
        r"files that should not.*/etc/passwd",
    ),
    "absurdly many ranks": (lambda c: c.tell(ranks=10**15), "cannot have 2 files"),
    "no ranks": (lambda c: c.tell(ranks=True), "its ranks or files are none"),
    "unknown keys of a file": (
        lambda c: c.tell(files={n: {**s, "url": ""} for n, s in c.told()["files"].items()}),
        "other keys than size and sha256",
    ),
    "a key twice": (
        lambda c: c.index.write_text(c.index.read_text().replace("{", '{"version": 1,', 1)),
        "a key is there twice",
    ),
    "nesting": (lambda c: c.index.write_text(nested(200_000)), "nested too deeply|not JSON"),
    "not a number": (lambda c: c.index.write_text("NaN"), "NaN is no JSON"),
    "a huge number": (lambda c: c.index.write_text("1" * 100_000), "not JSON|not the index"),
    "no object": (lambda c: c.index.write_text("[]"), "not the index of a checkpoint"),
    "a link as index": (lambda c: c.link(c.index), "index.json"),
    "a link as file": (lambda c: c.link(c.shared), "shared.safetensors"),
    "a link as checkpoint": (lambda c: c.link(c.folder), "is a link"),
    "a pipe as file": (lambda c: c.pipe(c.shared), "not a regular file"),
    "a pipe as index": (lambda c: c.pipe(c.index), "not a regular file"),
    "an endless header": (
        lambda c: c.replace(b"\xff" * 7 + b"\x7f" + b"{" * 20),
        "not a safetensors",
    ),
    "a tiny file": (lambda c: c.replace(b"\2\0\0"), "not a safetensors"),
    "tensors that overlap": (
        lambda c: c.entry(data_offsets=[4, 404]),
        r"tensor '.*' begins at byte",
    ),
    "a tensor outside": (lambda c: c.entry(data_offsets=[10**12, 10**12 + 400]), "begins at byte"),
    "a place backwards": (lambda c: c.entry(data_offsets=[400, 0]), "is not -400 bytes"),
    "a negative place": (lambda c: c.entry(data_offsets=[-400, 0]), "impossible shape or place"),
    "an absurd shape": (lambda c: c.entry(shape=[2**40, 2**40]), "is not 400 bytes"),
    "an absurd empty shape": (
        lambda c: c.entry(shape=[0, 2**62], data_offsets=[0, 0]),
        "impossible shape|begins at byte",
    ),
    "a shape of fractions": (lambda c: c.entry(shape=[100.0]), "impossible shape or place"),
    "a shape of truths": (lambda c: c.entry(shape=[100, True]), "impossible shape or place"),
    "an unknown dtype": (lambda c: c.entry(dtype="object"), "unknown dtype 'object'"),
    "unknown keys of a tensor": (lambda c: c.entry(code="x"), "other keys than dtype"),
    "a header that is a list": (
        lambda c: c.header(lambda told: b"{}  "),
        "not JSON|says nothing|take 0",
    ),
    "metadata that are none": (
        lambda c: c.header(lambda told: told.update(__metadata__={"relaxmpi": [1]})),
        "metadata are not text",
    ),
    "things that are none": (lambda c: c.thing(lambda things: "[]"), "says nothing"),
    "things twice": (lambda c: c.thing(lambda things: '{"x": 1, "x": 2}'), "twice"),
    "things that a rank has too": (
        lambda c: c.thing(lambda things: things.update(mine=things["value"])),
        "repeats mine",
    ),
    "a value of unknown kind": (lambda c: c.value({"eval": "1"}), "unknown kind: 'eval'"),
    "a value of two kinds": (lambda c: c.value({"dict": [], "tuple": []}), "unknown kind"),
    "a value of no kind": (lambda c: c.value({}), "unknown kind"),
    "a dtype that is code": (lambda c: c.value({"dtype": ["torch", "load"]}), "kind dtype is none"),
    "a scalar of objects": (lambda c: c.value({"scalar": ["object", "00"]}), "kind scalar is none"),
    "half a scalar": (lambda c: c.value({"scalar": ["float64", "00"]}), "kind scalar is none"),
    "a dict as key": (lambda c: c.value({"dict": [[[], 1]]}), "kind dict is none"),
    "a key of a value twice": (lambda c: c.value({"dict": [["a", 1], ["a", 2]]}), "twice"),
    "a deep value": (lambda c: c.value(json.loads(nested(80))), "nested more than 64"),
    "an array that is not there": (
        lambda c: c.value({"array": ["y", "numpy", "float32", [100]]}),
        "tensor 'y' of 'float32' is not in it",
    ),
    "an array of other size": (
        lambda c: c.value({"array": ["x", "numpy", "float32", [2**40]]}),
        "is not in it",
    ),
    "an array of unknown kind": (
        lambda c: c.value({"array": ["x", "os", "float32", [100]]}),
        "no known kind",
    ),
    "an array of objects": (
        lambda c: c.value({"array": ["x", "numpy", "object", [100]]}),
        "kind array is none",
    ),
    "a float that is none": (lambda c: c.value({"float": "zz"}), "kind float is none"),
}


def saved(folder):
    def program():
        with rx.Comm.world() as comm:
            rx.save(folder, comm, x=np.ones(100, "f4"), value=[1], mine=comm.rank)

    rx.SimulatedWorld(2).run(program)
    return Checkpoint(folder)


@pytest.mark.parametrize("what", [*DAMAGED, *HOSTILE])
def test_it_is_refused_by_name_on_all_ranks_and_changes_nothing(what, tmp_path):
    spoil, why = {**DAMAGED, **HOSTILE}[what]
    checkpoint = saved(tmp_path / "run")
    spoil(checkpoint)

    def program():
        with rx.Comm.world() as comm:
            x = np.zeros(100, "f4")
            with pytest.raises(rx.CheckpointError, match=why) as error:
                rx.load(tmp_path / "run", comm, x=x)
            assert not x.any()
            assert str(checkpoint.folder.name) in str(error.value)
            assert rx.allreduce(comm, 1) == 2, "the Comm goes on"
            return str(error.value)

    first, second = rx.SimulatedWorld(2).run(program)
    assert first == second
    assert len(first) < 2000
    assert not Path(BOOM).exists()


def test_a_checkpoint_of_another_model_is_refused_and_says_what_differs(tmp_path):
    def model(width, bias=True, dtype=torch.float32):
        return torch.nn.Sequential(
            torch.nn.Linear(4, width, bias=bias), torch.nn.Linear(width, 2)
        ).to(dtype)

    def program():
        with rx.Comm.world() as comm:
            opt = rx.SGD().bind(comm, np.ones(2), lr=1.0)
            rx.save(tmp_path, comm, model=model(8), opt=opt, x=np.ones((2, 3)), n=1)
            said = []
            for things in (
                {"model": model(9)},
                {"model": model(8, bias=False)},
                {"model": model(8, dtype=torch.float64)},
                {"x": np.ones((3, 2))},
                {"x": torch.ones((2, 3))},
                {"opt": rx.DiLoCo(every=2).bind(comm, np.ones(2), lr=1.0)},
                {"opt": model(8)},
                {"modle": model(8)},
            ):
                with pytest.raises(rx.CheckpointError) as error:
                    rx.load(tmp_path, comm, **things)
                said.append(str(error.value).split(": ", 1)[1])
            rx.load(tmp_path, comm, x=torch.ones((2, 3), dtype=torch.float64), n=0)
            return said

    first, second = rx.SimulatedWorld(2).run(program)
    assert first == second
    ends = (
        "model is another one: 0.bias is float32 [8] and here float32 [9]; 0.weight is float32",
        "model is another one: 0.bias is not here",
        "0.bias is float32 [8] and here float64 [8]; 0.weight is",
        "x is another one: it is float64 [2, 3] and here float64 [3, 2]",
        "x is another one: it is float64 [2, 3] and here float32 [2, 3]",
        "opt is state of BoundSGD in it, and state of BoundDiLoCo here",
        "opt is state of BoundSGD in it, and module here",
        "there is no modle in it, only model, n, opt, x",
    )
    for text, end in zip(first, ends, strict=True):
        assert end in text


def test_a_folder_that_only_some_ranks_see_is_an_error_on_all(tmp_path):
    """Ranks on two machines without a common file system."""

    def program():
        with rx.Comm.world() as comm:
            mine = tmp_path / f"disk of rank {comm.rank}"
            with pytest.raises(rx.CheckpointError, match="not the folder that rank 0 sees") as one:
                rx.save(mine, comm, x=np.ones(3))
            assert not list(mine.glob("*")), "nothing is left"
            alone = comm.split(comm.rank)
            if comm.rank == 1:
                rx.save(mine, alone, x=np.ones(3))
            alone.close()
            with pytest.raises(rx.CheckpointError, match="here, but rank 0 does not see") as two:
                rx.load(mine, comm, missing_ok=True)
            alone = comm.split(comm.rank)
            if comm.rank == 0:
                rx.save(mine, alone, x=np.zeros(3))
            alone.close()
            with pytest.raises(rx.CheckpointError, match="another checkpoint than") as three:
                rx.load(mine, comm)
            return [str(error.value) for error in (one, two, three)]

    first, second = rx.SimulatedWorld(2).run(program)
    assert [len(text) for text in first] == [len(text) for text in second]


@pytest.mark.ranks(2, 3)
def test_a_rank_that_cannot_write_is_an_error_on_all_and_leaves_the_old_one(comm, tmp_path):
    folder = comm.mpi.bcast(tmp_path)

    class Failing:
        def __init__(self, error):
            self.error = error

        def state_dict(self):
            if comm.rank == 1:
                raise self.error
            return {}

        def load_state_dict(self, state):
            self.state_dict()

    assert rx.save(folder, comm, step=1).name == "00000001"
    with pytest.raises(rx.CheckpointError, match=r"OSError: \[Errno 28\] full.*rank 1"):
        rx.save(folder, comm, thing=Failing(OSError(28, "full")))
    with pytest.raises(KeyboardInterrupt if comm.rank == 1 else rx.CheckpointError):
        rx.save(folder, comm, thing=Failing(KeyboardInterrupt()))
    assert rx.load(folder, comm) == {"step": 1}
    assert sorted(p.name for p in folder.iterdir()) == ["00000001"]
    with pytest.raises(rx.MismatchError):
        rx.save(folder, comm, **({"a": 1} if comm.rank else {"b": 1}))
    rx.barrier(comm)
