"""DeepFM: a linear term, a factorization machine and a deep network over the same ids, added up.

After Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction" (2017).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from bagpipe.models.base import Device, RecommendationModel, embedding_bags, mlp
from bagpipe.types import Ids, Table


class DeepFM(RecommendationModel):
    """The linear term is a row of width 1 an id, beside the row of `embeddings`.

    The published model leaves numeric features out; with `numeric_features` they enter the linear term and the deep
    network too.
    """

    linear: nn.ModuleDict
    """The layer of width 1 of each table, by its name."""

    def __init__(
        self,
        tables: Sequence[Table],
        num_dense: int,
        dim: int = 48,
        *,
        deep: Sequence[int] = (64, 64, 64),
        numeric_features: bool = False,
        device: Device = None,
    ) -> None:
        super().__init__(tables, num_dense, dim)
        used = num_dense if numeric_features else 0
        self.bias = nn.Parameter(torch.zeros(1))
        self.numeric_linear = nn.Linear(used, 1, bias=False) if used else None
        # Not batch normalisation: its statistics depend on how a batch is split over trainers.
        self.deep = mlp(len(self.fields) * dim + used, deep, 1, normalise=True)
        self.embeddings = embedding_bags(tables, dim, device)
        self.linear = embedding_bags(tables, dim, device, width=1)

    def forward(self, dense: Tensor, sparse: Mapping[str, Ids]) -> Tensor:
        """Logits, shape (samples,)."""
        dense = self.numeric(dense)
        vectors = torch.stack(self.pool(self.embeddings, sparse), 1)
        linear = torch.cat(self.pool(self.linear, sparse), 1).sum(1) + self.bias
        flat = vectors.flatten(1)
        if self.numeric_linear is not None:
            linear = linear + self.numeric_linear(dense).squeeze(1)
            deep: Tensor = self.deep(torch.cat([flat, dense], 1))
        else:
            deep = self.deep(flat)
        return linear + factorization(vectors) + deep.squeeze(1)


def factorization(vectors: Tensor) -> Tensor:
    """Sum of the dot products of all pairs of fields; vectors of shape (samples, fields, dim).

    Linear in the number of fields: the square of the sum less the sum of the squares holds each pair twice.
    """
    return (vectors.sum(1).square().sum(1) - vectors.square().sum((1, 2))) / 2
