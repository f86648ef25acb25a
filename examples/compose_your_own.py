"""A new algorithm in ten lines: local SGD whose ranks meet every few steps, in 4 bits.

    mpirun -n 4 python examples/compose_your_own.py

Between two meetings every rank descends alone. At a meeting the ranks average how far they came
since the last one (Stich 2018, arXiv 1805.09767), quantised, with error feedback on both sides.
All ranks add the same bytes to the same anchor, so they leave every meeting bit-identical.
"""

import numpy as np
from sklearn.datasets import load_digits

import relaxmpi as rx


def local_sgd(comm, x, gradients, lr, every=8):
    """Descend along `gradients`, functions of x, one a step; x is changed in place."""
    memory = rx.ErrorFeedback(rx.Quantizer(bits=4))
    anchor = x.copy()
    for t, gradient in enumerate(gradients, 1):
        x -= lr * gradient(x)
        if t % every == 0:
            moved = x - anchor
            rx.allreduce(comm, moved, op=rx.MEAN, codec=memory, name="moved")
            anchor += moved
            x[:] = anchor
    return x


def main():
    """Learn the digits with it."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    targets = np.eye(10, dtype="float32")[labels]

    with rx.Comm.world() as comm:
        mine, told = images[comm.rank : 1440 : comm.size], targets[comm.rank : 1440 : comm.size]

        def gradient(x):
            scores = np.exp(mine @ x)
            return mine.T @ (scores / scores.sum(axis=1, keepdims=True) - told) / len(mine)

        x = local_sgd(comm, np.zeros((64, 10), "float32"), [gradient] * 400, lr=0.5)
        right = (images[1440:] @ x).argmax(axis=1) == labels[1440:]
        same = rx.allreduce(comm, x.copy(), op=rx.MAX).tobytes() == x.tobytes()
        everywhere = rx.allreduce(comm, int(same), op=rx.MIN) == 1
        if comm.rank == 0:
            sent = comm.stats.payload_bytes / 400
            print(f"{comm.size} ranks: {right.mean():.1%} right, {sent:.0f} bytes a step and rank")
            print(f"equal on all ranks: {'yes' if everywhere else 'NO'}")


if __name__ == "__main__":
    main()
