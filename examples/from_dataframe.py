"""Train on a DataFrame without a loader: texts and integers become rows, and new data is encoded as the first was."""

import numpy as np
import pandas as pd
import torch
from torch import nn

import bagpipe
from bagpipe.data import IndexedDataset, from_frame
from bagpipe.metrics import auc


def make_frame(samples: int, seed: int) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    user, city = random.zipf(1.3, samples) % 100_000, random.integers(0, 50, samples)
    tags = [random.integers(0, 30, length) for length in random.integers(0, 4, samples)]
    odds = (city % 5 - 2) + (user % 3 - 1) + np.array([(bag % 7 - 3).sum() for bag in tags]) / 2
    return pd.DataFrame(
        {
            "clicked": random.random(samples) < 1 / (1 + np.exp(-odds)),
            "hour": random.random(samples),
            "user": user,
            "city": np.char.add("city ", city.astype(str)),
            "tags": [[f"tag {tag}" for tag in bag] for bag in tags],
        }
    )


class Net(nn.Module):
    def __init__(self, data: IndexedDataset) -> None:
        super().__init__()
        sizes = {table.name: table.rows or 100_000 for table in data.tables}
        bags = {name: nn.EmbeddingBag(size, 16, mode="sum", device="meta") for name, size in sizes.items()}
        self.bags = nn.ModuleDict(bags)
        self.top = nn.Sequential(nn.Linear(16 * len(bags) + data.num_dense, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch: bagpipe.Batch) -> torch.Tensor:
        vectors = [bag(batch.sparse[name].values, batch.sparse[name].offsets) for name, bag in self.bags.items()]
        logits: torch.Tensor = self.top(torch.cat([*vectors, batch.dense], 1)).squeeze(1)
        return logits


torch.manual_seed(0)
names = ("user", "city", "tags")
data = from_frame(make_frame(40_000, seed=0), label="clicked", numeric=("hour",), categorical=names)
later = from_frame(
    make_frame(10_000, seed=1), label="clicked", numeric=("hour",), categorical=names, vocabulary=data.vocabulary
)
model, loss_fn = Net(data), nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
rows = bagpipe.optim.Adagrad(lr=0.05)  # Adam would move rows that a batch does not name
batches = data.batches(512, epochs=3, seed=0)
model, optimizer, loader = bagpipe.prepare(model, optimizer, batches, rows=rows, cache="2MB")
for batch in loader:
    loss = loss_fn(model(batch), batch.labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
with torch.no_grad():
    scored = [(batch.labels, model(batch)) for batch in later.batches(2048)]
labels, scores = (torch.cat(parts) for parts in zip(*scored, strict=True))
print(f"AUC {auc(labels, scores):.3f} on {later.num_samples:,} samples not seen")
