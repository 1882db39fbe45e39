"""Deep&Cross: fields and the output of a bottom network pass cross layers, then a top network.

After Wang et al., "Deep & Cross Network for Ad Click Predictions" (2017), with the low-rank cross layers of its second
version (2021).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from bagpipe.models.base import Device, RecommendationModel, embedding_bags, mlp
from bagpipe.types import Ids, Table


class CrossLayer(nn.Module):
    """x + x0 * (U V x + b): crosses of one degree more, with a matrix of low rank."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """The next x; all of shape (samples, width)."""
        return torch.addcmul(x, x0, self.up(self.down(x)))


class DeepCross(RecommendationModel):
    """Without numeric features there is no bottom network, and the cross layers see the fields only."""

    def __init__(
        self,
        tables: Sequence[Table],
        num_dense: int,
        dim: int = 48,
        *,
        bottom: Sequence[int] = (1024, 512, 256, 64),
        top: Sequence[int] = (1024, 512, 256),
        cross_layers: int = 2,
        cross_rank: int = 8,
        device: Device = None,
    ) -> None:
        super().__init__(tables, num_dense, dim)
        width = (len(self.fields) + (num_dense > 0)) * dim
        self.bottom = mlp(num_dense, [*bottom, dim]) if num_dense else None
        self.cross = nn.ModuleList(CrossLayer(width, cross_rank) for _ in range(cross_layers))
        self.top = mlp(width, top, 1)
        self.embeddings = embedding_bags(tables, dim, device)

    def forward(self, dense: Tensor, sparse: Mapping[str, Ids]) -> Tensor:
        """Logits, shape (samples,)."""
        dense = self.numeric(dense)
        pooled = self.pool(self.embeddings, sparse)
        bottom = [] if self.bottom is None else [self.bottom(dense)]
        crossed = x0 = torch.cat([*bottom, *pooled], 1)
        for layer in self.cross:
            crossed = layer(x0, crossed)
        logits: Tensor = self.top(crossed)
        return logits.squeeze(1)
