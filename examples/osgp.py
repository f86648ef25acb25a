"""Handwritten digits by overlap stochastic gradient push: no rank waits for this step's messages.

    mpirun -n 4 python examples/osgp.py

Each step every rank gives half of its model to one other, and adds what another gave it a step ago.
"""

import numpy as np
from sklearn.datasets import load_digits
from tqdm import trange

import relaxmpi as rx

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
targets = np.eye(10, dtype="float32")[labels]

with rx.Comm.world() as comm:
    mine = slice(comm.rank, 1440, comm.size)  # the others are for the test
    weights = np.zeros((64, 10), "float32")
    optimizer = rx.OSGP(tau=1).bind(comm, weights, lr=0.5)
    for _ in trange(300, desc="OSGP", disable=comm.rank > 0):
        scores = np.exp(images[mine] @ weights)  # where the next gradient is taken: de-biased
        errors = scores / scores.sum(axis=1, keepdims=True) - targets[mine]
        optimizer.step(images[mine].T @ errors / len(errors))

    model = optimizer.mean()  # of all ranks, with what is on its way: the one to evaluate
    spread = rx.allreduce(comm, np.linalg.norm(weights - model), op=rx.MAX) / np.linalg.norm(model)
    right = (images[1440:] @ model).argmax(axis=1) == labels[1440:]
    if comm.rank == 0:
        sent = comm.stats.payload_bytes / 300
        print(f"{comm.size} ranks: {right.mean():.1%} right, {sent:.0f} bytes a step and rank")
        print(f"no rank is further from the mean model than {spread:.2%} of its norm")
