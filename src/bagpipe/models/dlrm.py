"""DLRM: numeric features through a bottom network, dot products of all pairs of fields, a top network over both.

After Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems" (2019).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bagpipe.errors import ConfigError
from bagpipe.models.base import Device, RecommendationModel, embedding_bags, mlp
from bagpipe.types import Ids, Table


class DLRM(RecommendationModel):
    """The output of the bottom network is one more field; without numeric features there is neither."""

    pairs: Tensor

    def __init__(
        self,
        tables: Sequence[Table],
        num_dense: int,
        dim: int = 48,
        *,
        bottom: Sequence[int] = (512, 256, 64),
        top: Sequence[int] = (1024, 1024, 1024, 256, 128),
        device: Device = None,
    ) -> None:
        super().__init__(tables, num_dense, dim)
        fields = len(self.fields) + (num_dense > 0)
        if fields < 2:
            raise ConfigError("DLRM has one field and no numeric features, so no pairs: add either, or use wide_deep")
        self.bottom = mlp(num_dense, [*bottom, dim]) if num_dense else None
        self.top = mlp(fields * (fields - 1) // 2 + (dim if num_dense else 0), top, 1)
        rows, columns = torch.tril_indices(fields, fields, -1)
        self.register_buffer("pairs", rows * fields + columns, persistent=False)
        self.embeddings = embedding_bags(tables, dim, device)

    def forward(self, dense: Tensor, sparse: Mapping[str, Ids]) -> Tensor:
        """Logits, shape (samples,)."""
        dense = self.numeric(dense)
        pooled = self.pool(self.embeddings, sparse)
        bottom = [] if self.bottom is None else [self.bottom(dense)]
        vectors = torch.stack([*bottom, *pooled], 1)
        # One index a pair: faster than indexing with a list of rows and a list of columns.
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        logits: Tensor = self.top(torch.cat([*bottom, products], 1))
        return logits.squeeze(1)
