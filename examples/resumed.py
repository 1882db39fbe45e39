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


def make_loader(batches: int = 30, size: int = 256) -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(0)

    def make() -> dict[str, torch.Tensor]:
        user, item = ((torch.rand(size, 1, generator=random) ** 4 * rows).long() for rows in (50_000, 20_000))
        return {"user": user, "item": item, "label": ((user + item) % 2).float().squeeze(1)}

    return [make() for _ in range(batches)]


directory, path, *last = sys.argv[1:]
torch.manual_seed(0)
model = Net()
loss_fn = nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20)
checkpoint = bagpipe.Checkpointing(directory, every=10, keep=2, resume="auto")
model, optimizer, loader = bagpipe.prepare(model, optimizer, make_loader(), cache="1MB", checkpoint=checkpoint)
loader.register_for_checkpointing(scheduler)  # all that has a state of its own, beside model and optimizer
done = loader.loop.done
print(f"goes on after {done} iterations" if done else "begins")
for epoch in range(loader.epoch, 2):
    for batch in loader:
        loss = loss_fn(model(batch), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        done += 1
        if done % 20 == 0:
            print(f"iteration {done}: loss {loss.item():.4f} in epoch {epoch}")
        if last and done == int(last[0]):
            sys.exit(3)
bagpipe.export(model, path)  # reached also if it was ended right here, and there was no batch left
