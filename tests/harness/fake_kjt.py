"""What Bagpipe uses of TorchRec's KeyedJaggedTensor and JaggedTensor, for tests without TorchRec."""

from __future__ import annotations

import torch


class Jagged:
    """The ids of one key."""

    def __init__(self, values, lengths, weights=None):
        self._values, self._lengths, self._weights = values, lengths, weights

    def values(self):
        return self._values

    def lengths(self):
        return self._lengths

    def offsets(self):
        return torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(self._lengths, 0)])

    def weights_or_none(self):
        return self._weights


class KeyedJagged:
    """Ids of several keys, key after key, as bags of given lengths."""

    def __init__(self, keys, values, weights=None, lengths=None):
        self._keys, self._values, self._weights, self._lengths = keys, values, weights, lengths

    def keys(self):
        return self._keys

    def values(self):
        return self._values

    def lengths(self):
        return self._lengths

    def offsets(self):
        return torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(self._lengths, 0)])

    def weights_or_none(self):
        return self._weights

    def __getitem__(self, key):
        samples, at = len(self._lengths) // len(self._keys), self._keys.index(key)
        lengths = self._lengths[at * samples : (at + 1) * samples]
        part = slice(int(self._lengths[: at * samples].sum()), int(self._lengths[: (at + 1) * samples].sum()))
        return Jagged(self._values[part], lengths, None if self._weights is None else self._weights[part])
