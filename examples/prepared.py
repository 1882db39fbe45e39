"""The model of plain_pytorch.py with its tables out of the way and a small cache: the lines that differ are marked.

On two trainers with two servers: bagpipe launch --trainers 2 --servers 2 prepared.py
"""

import sys
from collections.abc import Iterable

import torch
from torch import nn

import bagpipe  # new


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(50_000, 16, mode="sum")
        self.item = nn.EmbeddingBag(20_000, 16, mode="sum")
        self.top = nn.Sequential(nn.Linear(36, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        vectors = [self.user(batch["user"]), self.item(batch["item"]), batch["dense"]]
        logits: torch.Tensor = self.top(torch.cat(vectors, 1)).squeeze(1)
        return logits


def make_loader(batches: int = 100, size: int = 512) -> Iterable[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(0)

    def ids(rows: int) -> torch.Tensor:
        return (torch.rand(size, 1, generator=random) ** 4 * rows).long()

    def make() -> dict[str, torch.Tensor]:
        batch = {"user": ids(50_000), "item": ids(20_000), "dense": torch.rand(size, 4, generator=random)}
        batch["label"] = ((batch["user"] + batch["item"]) % 2).float().squeeze(1)
        return batch

    return [make() for _ in range(batches)]


torch.manual_seed(0)
model = Net()
loader = make_loader()
loss_fn = nn.BCEWithLogitsLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer, loader = bagpipe.prepare(model, optimizer, loader, cache="1MB")  # new
for batch in loader:
    loss = loss_fn(model(batch), batch["label"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f}")
bagpipe.export(model, sys.argv[1] if len(sys.argv) > 1 else "model.safetensors")  # changed
