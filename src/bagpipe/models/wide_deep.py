"""Wide&Deep: numeric features through a deep network; its output and all fields feed one linear layer.

After Cheng et al., "Wide & Deep Learning for Recommender Systems" (2016), as arranged in the Bagpipe paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from bagpipe.models.base import Device, RecommendationModel, embedding_bags, mlp
from bagpipe.types import Ids, Table


class WideDeep(RecommendationModel):
    """Without numeric features only the wide part remains."""

    def __init__(
        self,
        tables: Sequence[Table],
        num_dense: int,
        dim: int = 48,
        *,
        deep: Sequence[int] = (256, 256, 256),
        device: Device = None,
    ) -> None:
        super().__init__(tables, num_dense, dim)
        self.deep = mlp(num_dense, deep) if num_dense else None
        deep_width = [num_dense, *deep][-1] if num_dense else 0
        self.output = nn.Linear(deep_width + len(self.fields) * dim, 1)
        self.embeddings = embedding_bags(tables, dim, device)

    def forward(self, dense: Tensor, sparse: Mapping[str, Ids]) -> Tensor:
        """Logits, shape (samples,)."""
        dense = self.numeric(dense)
        pooled = self.pool(self.embeddings, sparse)
        deep = [] if self.deep is None else [self.deep(dense)]
        logits: Tensor = self.output(torch.cat([*deep, *pooled], 1))
        return logits.squeeze(1)
