"""The examples in the README run as they stand there."""

import re
import socket
import textwrap
from pathlib import Path

import numpy as np
import pytest
from mpi_worlds.launch import Launch
from mpi_worlds.stacks import stacks

import relaxmpi as rx

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
MEMORIES = re.findall(r"`((?:lost|told) = rx\.[^`]*)`", README)
CELLS = re.findall(r"`(rx\.[^`]*\(comm, x[^`]*)`", README[README.index("## What there is") :])

LOOP = """
import torch
import relaxmpi as rx
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_function = torch.nn.functional.cross_entropy
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
loader = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(3)]
"""


def test_there_is_one_for_each_use():
    assert len(BLOCKS) == 10


@pytest.mark.parametrize("n", [1, 3])
def test_primitives(launch, n):
    done = launch(BLOCKS[0] + "print('loss', loss, 'mean', x[0])", n)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"loss 0.25 mean {(n - 1) / 2}") == n


def test_a_new_algorithm(launch):
    body = """
import numpy as np
import relaxmpi as rx
with rx.Comm.world() as comm:
    target = np.arange(4.0)
    x = np.zeros(4)
    local_sgd(comm, x, [lambda x: x - target + comm.rank - 1] * 200, lr=0.1)
    print("distance", np.abs(x - target).max() < 0.1)
"""
    done = launch(BLOCKS[1] + body, 3)
    assert done.stdout.count("distance True") == 3, done.stderr


def test_a_new_primitive(launch):
    body = """
with rx.Comm.world() as comm:
    mean, spread = mean_and_spread.start(comm, np.full(2, float(comm.rank))).wait()
    print("spread", mean[0] == 1 and abs(spread[0] - 2 / 3) < 1e-9)
"""
    done = launch("import numpy as np\nimport relaxmpi as rx\n" + BLOCKS[2] + body, 3)
    assert done.stdout.count("spread True") == 3, done.stderr


LAST = "sync.detach()\ncomm.close()\n"


def programs(folder: Path) -> dict[str, str]:
    """The loops of the README in one process each rank, because torch takes seconds to import."""
    uneven = "loader += loader[: comm.rank]\n"
    begin, end = (
        BLOCKS[3]
        .replace("sync = rx.attach(model, optimizer, rx.QSGD(bits=8), comm=comm)", "")
        .split("\n\n", 1)
    )
    kept = BLOCKS[9].replace('"runs/a"', repr(str(folder)))
    return {
        "a loop": LOOP + BLOCKS[3] + "print('a loop:', sync.stats().steps)\n" + LAST,
        "what else": LOOP + BLOCKS[3] + uneven + BLOCKS[4]
        + "print('what else:', sync.stats().steps, scheduler.last_epoch)\n" + LAST,
        "1-bit Adam": LOOP + "steps = 10\n" + begin + "\n" + BLOCKS[8] + end
        + "print('1-bit Adam:', sync.stats().steps)\n" + LAST,
        "save": LOOP + BLOCKS[3] + kept + "print('save:', begun)\n" + LAST,
        "resume": LOOP + BLOCKS[3] + kept + "print('resume:', begun)\n" + LAST,
        "DDP": BLOCKS[5] + "print('DDP:', model.module.weight.grad.shape)\n",
    }  # fmt: skip


@pytest.fixture(scope="module")
def loops(tmp_path_factory):
    """What the programs have printed on two ranks."""
    pytest.importorskip("torch")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
    one_after_the_other = (
        f"for name, text in {programs(tmp_path_factory.mktemp('runs'))!r}.items():\n"
        "    exec(compile(text, f'<{name}>', 'exec'), {'__name__': '__main__'})\n"
    )
    launch = Launch(tmp_path_factory.mktemp("loops"), stacks())
    return launch(one_after_the_other, 2, env=where, timeout=120)


@pytest.mark.parametrize(
    "said",
    [
        "a loop: 3",
        "what else: 8 4",
        "1-bit Adam: 3",
        "save: {}",
        "resume: {'step': 1}",
        "DDP: torch.Size([2, 4])",
    ],
)
def test_loops(loops, said):
    assert loops.stdout.count(said + "\n") == 2, loops.stderr


def test_nothing_else_goes_wrong_in_them(loops):
    assert loops.returncode == 0, loops.stderr
    assert "Error" not in loops.stderr


def test_a_simulated_world():
    names = {}
    exec(BLOCKS[6], names)
    assert len(names["means"]) == 16
    assert names["means"][0][0] == pytest.approx(7.5, abs=1.0)


def test_neighbours(launch):
    body = """
import numpy as np
import relaxmpi as rx
with rx.Comm.world() as comm:
    weights, target = np.zeros(3), np.arange(3) + comm.rank - 1.0
    gradient = lambda weights: weights - target
""" + textwrap.indent(BLOCKS[7], "    ")
    done = launch(body + "    print('near', np.abs(model - np.arange(3)).max() < 0.1)", 3)
    assert done.stdout.count("near True") == 3, done.stderr


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("n", [2, 3])
def test_every_cell_has_a_line_that_runs(cell, n):
    def program():
        with rx.Comm.world() as comm:
            x, w = np.full(600, float(comm.rank)), np.ones(1)
            given = {"rx": rx, "comm": comm, "x": x, "w": w}
            exec("\n".join(MEMORIES), given)
            for _ in range(30):
                result = eval(cell, given)
                if isinstance(result, rx.Work):
                    dx, dw = result.wait()
                    x += dx
                    w += dw
            return x / w

    for mean in rx.SimulatedWorld(n).run(program):
        assert mean == pytest.approx((n - 1) / 2, abs=0.01)


def test_there_is_a_line_for_every_cell():
    assert len(CELLS) == 6
    assert len(MEMORIES) == 2
