"""Training that can be ended at any moment and started again: it goes on, and ends with the same bits.

python resumed.py checkpoints model.safetensors [LAST]     LAST: leave off after so many iterations
"""

import sys

import torch
from torch import nn

import bagpipe


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(50_000, 16, mode="sum", device="meta")
        self.item = nn.EmbeddingBag(20_000, 16, mode="sum", device="meta")
        self.top = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = self.top(torch.cat([self.user(batch["user"]), self.item(batch["item"])], 1)).squeeze(1)
        return logits


def make_loader(batches: int = 60, size: int = 256) -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(0)

    def make() -> dict[str, torch.Tensor]:
        user, item = ((torch.rand(size, 1, generator=random) ** 4 * rows).long() for rows in (50_000, 20_000))
        return {"user": user, "item": item, "label": ((user + item) % 2).float().squeeze(1)}

    return [make() for _ in range(batches)]


directory, path, *last = sys.argv[1:]
torch.manual_seed(0)
model = Net()
rows = bagpipe.optim.Adagrad(lr=0.1)
loss_fn = nn.BCEWithLogitsLoss()
checkpoint = bagpipe.Checkpointing(directory, every=10, keep=2)
with bagpipe.accelerate(model, make_loader(), rows, cache="1MB", checkpoint=checkpoint, resume="auto") as batches:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20)
    batches.attach(optimizer=optimizer, scheduler=scheduler)  # all that has a state of its own
    print(f"goes on after {batches.done} iterations" if batches.done else "begins")
    for batch in batches:
        loss = loss_fn(model(batch), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rows.step()
        scheduler.step()
        if batches.done % 20 == 0:
            print(f"iteration {batches.done}: loss {loss.item():.4f}")
        if last and batches.done == int(last[0]):
            sys.exit(3)
bagpipe.export(model, path)  # reached also if it was ended right here, and there was no batch left
