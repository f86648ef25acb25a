"""Train a convolutional and recurrent network that reads digits column by column.

    mpirun -n 4 python examples/cnn_lstm.py --algorithm qsgd4 --epochs 3

Convolutions see strokes, an LSTM goes over them from left to right (Shi et al. 2015, CRNN). The
data, the algorithms and the way to train are those of train_digits.py; the network is another one.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm
from train_digits import ALGORITHMS, digits, equal

import relaxmpi as rx


class ConvLSTM(nn.Module):
    """Features of 14 columns, read by an LSTM; 126,570 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Sequential(
            nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d((2, 1)),
        )  # fmt: skip
        self.reader = nn.LSTM(16 * 7, 128, batch_first=True)
        self.answer = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (batch, 1, 28, 28) to (batch, 10) scores."""
        columns = self.columns(images).flatten(1, 2).transpose(1, 2)
        states, _ = self.reader(columns)
        return self.answer(states[:, -1])


def main() -> None:
    """Read the command line, train, report on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="qsgd8")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16, help="images a rank and step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with rx.Comm.world() as comm:
        torch.manual_seed(given.seed)
        torch.set_num_threads(1)
        train_data, test_data = digits(comm)
        sampler = DistributedSampler(
            train_data, comm.size, comm.rank, seed=given.seed, drop_last=True
        )
        loader = DataLoader(train_data, given.batch, sampler=sampler, drop_last=True)
        model = ConvLSTM()
        optimizer = torch.optim.Adam(model.parameters(), lr=given.lr)

        with rx.attach(model, optimizer, ALGORITHMS[given.algorithm], comm=comm) as sync:
            for epoch in range(given.epochs):
                sampler.set_epoch(epoch)
                bar = tqdm(loader, f"{given.algorithm}, epoch {epoch + 1}", disable=comm.rank > 0)
                for images, labels in bar:
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(images), labels)
                    loss.backward()
                    optimizer.step()
            sent = sync.stats().payload_bytes

        with torch.no_grad():
            images, labels = test_data.tensors
            right = (model(images).argmax(1) == labels).double().mean().item()
        same = equal(comm, model)
        if comm.rank == 0:
            print(
                f"{comm.size} ranks, {given.algorithm}: {right:.1%} of 1,000 test images right, "
                f"{sent:,.0f} bytes a step; equal on all ranks: {'yes' if same else 'NO'}"
            )
        if not same:
            raise SystemExit("the ranks hold different models")


if __name__ == "__main__":
    main()
