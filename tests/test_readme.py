"""The examples in the README run as they stand there."""

import re
import socket
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)

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
    assert len(BLOCKS) == 7


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


def test_a_loop(launch):
    pytest.importorskip("torch")
    done = launch(LOOP + BLOCKS[3] + "print('steps', sync.stats().steps)", 2, timeout=60)
    assert done.stdout.count("steps 3") == 2, done.stderr


def test_what_else_a_loop_may_need(launch):
    pytest.importorskip("torch")
    uneven = "loader += loader[: comm.rank]\n"
    said = "print('steps', sync.stats().steps, scheduler.last_epoch)"
    done = launch(LOOP + BLOCKS[3] + uneven + BLOCKS[4] + said, 2, timeout=60)
    assert done.stdout.count("steps 8 4") == 2, done.stderr


def test_a_simulated_world():
    names = {}
    exec("import numpy as np\nimport relaxmpi as rx\n" + BLOCKS[6], names)
    assert len(names["means"]) == 16
    assert names["means"][0][0] == pytest.approx(7.5, abs=1.0)


def test_a_loop_that_keeps_ddp(launch):
    pytest.importorskip("torch")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
    done = launch(BLOCKS[5], 2, env=where, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tensor([[") == 2
