"""A user's own loop over the frozen data, in the form of whichever public entry the installed release has.

python script.py DATA CHECKPOINTS [KILL_AT]: prints a digest of the plain weights that it exports. With KILL_AT it ends
itself with SIGKILL after so many iterations; started again, it goes on from its last checkpoint.
"""

import hashlib
import os
import signal
import sys
import tempfile
from pathlib import Path

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file
from torch import nn

import bagpipe

FEATURES = {"user": 1000, "item": 500, "city": 20}
loss_fn = nn.BCEWithLogitsLoss()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleDict(
            {name: nn.EmbeddingBag(rows, 8, mode="sum", device="meta") for name, rows in FEATURES.items()}
        )
        self.top = nn.Sequential(nn.Linear(28, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def forward(self, batch):
        return self.top(torch.cat([*(bag(batch[name]) for name, bag in self.bags.items()), batch["dense"]], 1))[:, 0]


def make_loader(path, size=64):
    table = pq.read_table(path)
    columns = {name: torch.tensor(table[name].to_pylist()) for name in (*FEATURES, "label")}
    dense = torch.tensor([table[f"dense_{number}"].to_pylist() for number in range(4)]).T.contiguous()
    return [
        {
            **{name: columns[name][start : start + size, None].clone() for name in FEATURES},
            "dense": dense[start : start + size].clone(),
            "label": columns["label"][start : start + size].clone(),
        }
        for start in range(0, len(dense), size)
    ]


def train_now(model, loader, checkpoints):
    """After each iteration how many there were."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rows = bagpipe.optim.Adagrad(lr=0.1)
    keep = bagpipe.Checkpointing(checkpoints, every=5, keep=2, resume="auto")
    model, optimizer, loader = bagpipe.prepare(model, optimizer, loader, rows=rows, cache=900, checkpoint=keep)
    loader.register_for_checkpointing()
    for _ in range(loader.epoch, 1):
        for batch in loader:
            loss = loss_fn(model(batch), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loader.loop.done


def train_at_start(model, loader, checkpoints):
    """The same as the release at the start has it."""
    rows = bagpipe.optim.Adagrad(lr=0.1)
    keep = bagpipe.Checkpointing(checkpoints, every=5, keep=2)
    with bagpipe.accelerate(model, loader, rows, cache=900, checkpoint=keep, resume="auto") as batches:
        dense = torch.optim.Adam(model.parameters(), lr=0.01)
        batches.attach(dense=dense)
        for batch in batches:
            loss = loss_fn(model(batch), batch["label"])
            dense.zero_grad()
            loss.backward()
            dense.step()
            rows.step()
            yield batches.done


def main(data, checkpoints, kill_at=0):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Net()
    train = train_now if hasattr(bagpipe, "prepare") else train_at_start
    for done in train(model, make_loader(data), checkpoints):
        if done == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.safetensors"
        bagpipe.export(model, path)
        digest = hashlib.sha256()
        for name, value in sorted(load_file(path).items()):
            digest.update(f"{name} {tuple(value.shape)}\n".encode() + value.numpy().tobytes())
    print(digest.hexdigest())


main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
