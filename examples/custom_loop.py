"""Somebody's training loop on many ranks, by three added lines.

    mpirun -n 4 python examples/custom_loop.py

The added lines are marked. Whatever your way of sharding data is, it stays; here it is a slice.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import relaxmpi as rx  # added

torch.manual_seed(0)
torch.set_num_threads(1)
images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
images, labels = images.float() / 16, labels.long()

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)

comm = rx.Comm.world()  # added
sync = rx.attach(model, optimizer, rx.QSGD(bits=8), comm=comm)  # added

for epoch in range(20):
    order = torch.randperm(1440, generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(96):
        batch = batch[comm.rank :: comm.size]  # the share of this rank
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
    scheduler.step()

with torch.no_grad():
    right = (model(images[1440:]).argmax(1) == labels[1440:]).float().mean().item()
if comm.rank == 0:
    print(f"{comm.size} ranks: {right:.1%} right, {sync.stats().payload_bytes:.0f} bytes a step")
