"""Logistic regression on handwritten digits: numpy, 8-bit gradients.

    mpirun -n 4 python examples/quickstart.py

or any other number of ranks; each trains on its share of the images.
"""

import numpy as np
from sklearn.datasets import load_digits

import relaxmpi as rx

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
targets = np.eye(10, dtype="float32")[labels]

with rx.Comm.world() as comm:
    mine = slice(comm.rank, 1440, comm.size)  # the others are for the test
    weights = np.zeros((64, 10), "float32")
    optimizer = rx.QSGD(bits=8).bind(comm, weights, lr=0.5)
    for _ in range(300):
        scores = np.exp(images[mine] @ weights)
        errors = scores / scores.sum(axis=1, keepdims=True) - targets[mine]
        optimizer.step(images[mine].T @ errors / len(errors))

    right = (images[1440:] @ weights).argmax(axis=1) == labels[1440:]
    if comm.rank == 0:
        sent = comm.stats.payload_bytes / 300
        print(f"{comm.size} ranks: {right.mean():.1%} right, {sent:.0f} bytes a step and rank")
