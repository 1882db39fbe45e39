"""Synthetic data sets: samples as a pure function of (preset, seed, number), with labels that can be learned.

A hidden logistic model over numeric features and one hashed effect a row decides the labels; its probabilities are
known, so the best AUC that any model can reach is known too. Nothing is stored: no table, no generator state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from bagpipe.data.counter import UInts, below_reference, derive_key, feistel_side
from bagpipe.data.dataset import IndexedDataset
from bagpipe.data.draw import WEIGHT_STEPS, Law, add_effects, draw_dense, draw_ids, draw_weights
from bagpipe.data.popularity import sampler
from bagpipe.data.presets import Dials, Feature, Preset, find_preset
from bagpipe.data.samples import Column, Samples
from bagpipe.errors import ConfigError
from bagpipe.kernels.random import GOLDEN, mix_numpy
from bagpipe.table import Table

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DAYS_MAX = 4096
CALIBRATION_SAMPLES = 16_384
ODDS_LIMIT, ODDS_STEPS = 16, 256
GRID = 1024
"""Fitted numbers of the label model are rounded to 1/1024 or to multiples of 1024: so they are the same anywhere."""
SIGMOID: Floats = 1 / (1 + np.exp(-np.arange(-ODDS_LIMIT * ODDS_STEPS, ODDS_LIMIT * ODDS_STEPS + 1) / ODDS_STEPS))
NO_WEIGHTS = np.empty(0, dtype=np.float32)


@dataclass(frozen=True)
class FeatureStreams:
    """What is drawn for one feature, and from which streams."""

    name: str
    feature: Feature
    law: Law
    length_key: np.uint64
    weight_key: np.uint64
    effect_key: np.uint64
    factors: Ints
    """By number of ids: what `add_effects` multiplies a bag's effects with, so that their spread is that of one id."""


class Generated(IndexedDataset):
    """A synthetic data set, made while it is read."""

    def __init__(self, preset: Preset, samples: int, seed: int, dials: Dials | None = None) -> None:
        dials = dials or Dials()
        if samples < 0:
            raise ConfigError(f"{samples} samples of preset {preset.name!r}: give at least 0")
        self.preset, self.seed, self.dials = dials.turn(preset), seed, dials
        self.tables, self.num_dense, self.num_samples = preset.tables, preset.num_dense, samples
        streams = [self._streams(table, name) for table in preset.tables for name in table.features]
        # A feature that follows another is drawn after it; sorting is stable.
        self._features = sorted(streams, key=lambda stream: stream.feature.follows is not None)
        self._dense_keys = np.array([self._key("dense", j) for j in range(preset.num_dense)], dtype=np.uint64)
        self._dense_factors = self._dense_effects()
        self._label_key = self._key("label")
        self._centre, self._deviation, self._intercept = self._fit_labels()

    @property
    def origin(self) -> str:
        """What this data set is, in one line."""
        dials = "".join(
            f" {field.name}={getattr(self.dials, field.name)}"
            for field in fields(Dials)
            if getattr(self.dials, field.name) != field.default
        )
        return f"generated {self.preset.name} samples={self.num_samples} seed={self.seed}{dials}"

    def gather(self, samples: Ints) -> Samples:
        """The columns of these samples."""
        dense, columns, score = self._draw(samples)
        words = mix_numpy(self._label_key + samples.astype(np.uint64) * GOLDEN)
        chances = (words >> np.uint64(11)) * 2.0**-53
        labels = (chances < self._sigmoid(score)).astype(np.float32)
        return Samples(dense, columns, labels)

    def probabilities(self, samples: Ints) -> Floats:
        """The true probability that the label of each sample is 1."""
        return self._sigmoid(self._draw(samples)[2])

    def _key(self, *parts: object) -> np.uint64:
        return derive_key(self.preset.name, self.seed, *parts)

    def _streams(self, table: Table, name: str) -> FeatureStreams:
        feature = self.preset.features[name]
        lengths = np.maximum(np.arange(feature.most + 1), 1)
        return FeatureStreams(
            name,
            feature,
            self._law(table, name, feature),
            self._key("length", name),
            self._key("weight", name),
            self._key("effect", table.name),
            np.round(feature.effect * 2**24 / np.sqrt(lengths)).astype(np.int64),
        )

    def _law(self, table: Table, name: str, feature: Feature) -> Law:
        ranks = self.preset.ranks(table)
        drawn = sampler(feature.popularity, ranks)
        moving = feature.follows is None
        days = max(0, self.num_samples - 1) // self.preset.day_samples if self.preset.drift and moving else 0
        if days > DAYS_MAX:
            raise ConfigError(
                f"{self.num_samples} samples are {days} days of drift, more than {DAYS_MAX}: give day_samples of at "
                f"least {self.num_samples // DAYS_MAX + 1}"
            )
        return Law(
            key=self._key("ids", name),
            keep=drawn.keep,
            other=drawn.other,
            first=drawn.first,
            table_key=self._key("table", table.name),
            rows=np.uint64(table.rows or 0),
            side=feistel_side(ranks),
            pivots=np.array([self._key("drift", table.name, day) for day in range(days)], dtype=np.uint64),
            drift=_share(self.preset.drift if days else 0),
            day_samples=np.int64(self.preset.day_samples),
            burst=_share(self.dials.burst if moving else 0),
            burst_samples=np.uint64(self.dials.burst_samples),
        )

    def _dense_effects(self) -> Ints:
        """Factors of the numeric features: of either sign, half to one and a half times `dense_effect`."""
        words = mix_numpy(self._dense_keys)
        sizes = 0.5 + (words >> np.uint64(40)) * 2.0**-24
        signs = np.where(words & np.uint64(1), 1, -1)
        factors: Ints = np.round(signs * sizes * self.preset.dense_effect * WEIGHT_STEPS).astype(np.int64)
        return factors

    def _draw(self, samples: Ints) -> tuple[NDArray[np.float32], dict[str, Column], Ints]:
        """Numeric features, ids and hidden scores."""
        score = np.zeros(len(samples), dtype=np.int64)
        dense = np.empty((len(samples), self.num_dense), dtype=np.float32)
        draw_dense(samples, self._dense_keys, self._dense_factors, dense, score)
        drawn: dict[str, Column] = {}
        for stream in self._features:
            follows = stream.feature.follows
            counters = samples if follows is None else drawn[follows].values[:, 0]
            drawn[stream.name] = _draw_column(stream, counters, score)
        return dense, {name: drawn[name] for table in self.tables for name in table.features}, score

    def _fit_labels(self) -> tuple[int, float, float]:
        """Centre and deviation of the scores, and the log-odds of the centre, that give the preset's spread and CTR."""
        score = self._draw(np.arange(CALIBRATION_SAMPLES))[2]
        centre = int(score.sum()) // len(score)
        deviation = max(1, round(float(np.std(score - centre)) / GRID)) * float(GRID)
        odds = (score - centre) / deviation * self.preset.spread
        low, high = -20.0, 20.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if np.mean(1 / (1 + np.exp(-odds - middle))) < self.preset.ctr else (low, middle)
        return centre, deviation, round(low * GRID) / GRID

    def _sigmoid(self, score: Ints) -> Floats:
        """The probability of a score, interpolated in a table: math libraries differ in their last bits."""
        odds = (score - self._centre) / self._deviation * self.preset.spread + self._intercept
        place = np.clip((odds + ODDS_LIMIT) * ODDS_STEPS, 0, len(SIGMOID) - 1.001)
        index = place.astype(np.int64)
        return SIGMOID[index] + (SIGMOID[index + 1] - SIGMOID[index]) * (place - index)


def _share(value: float) -> np.uint64:
    return np.uint64(round(value * 2**32))


def _draw_column(stream: FeatureStreams, counters: Ints, score: Ints) -> Column:
    feature, width = stream.feature, stream.feature.ids
    if isinstance(width, int):
        offsets = np.arange(0, (len(counters) + 1) * width, width)
    else:
        offsets = _bag_offsets(stream, counters)
    values = np.empty(offsets[-1], dtype=np.int64)
    draw_ids(counters, offsets, stream.law, values)
    weights = NO_WEIGHTS
    if feature.weighted:
        weights = np.empty(len(values), dtype=np.float32)
        draw_weights(counters, offsets, stream.weight_key, weights)
    add_effects(values, offsets, weights, stream.effect_key, stream.factors, score)
    given = weights if feature.weighted else None
    if isinstance(width, int):
        return Column(values.reshape(-1, width), None, None if given is None else given.reshape(-1, width))
    return Column(values, offsets, given)


def _bag_offsets(stream: FeatureStreams, counters: Ints) -> Ints:
    words: UInts = mix_numpy(stream.length_key + counters.astype(np.uint64) * GOLDEN)
    choices = np.uint64(stream.feature.most - stream.feature.fewest + 1)
    lengths = below_reference(words, choices).astype(np.int64) + stream.feature.fewest
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])


def generated(preset: str | Preset, samples: int | None = None, seed: int = 0, **dials: float | None) -> Generated:
    """A synthetic data set of this many samples (without a number: as many as the original); dials: see `Dials`."""
    found = find_preset(preset) if isinstance(preset, str) else preset
    return Generated(found, found.samples if samples is None else samples, seed, _dials(dials))


def best_auc(preset: str | Preset, samples: int = 1 << 18, seed: int = 0, **dials: float | None) -> float:
    """The AUC of a model that knows the true probabilities: expected over labels, on the first samples."""
    source = generated(preset, samples, seed, **dials)
    parts = [np.arange(start, min(start + (1 << 16), samples)) for start in range(0, samples, 1 << 16)]
    chances = np.sort(np.concatenate([source.probabilities(part) for part in parts]))
    # Each pair of a positive i and a negative j counts p_i (1 - p_j) when i ranks above j.
    misses = 1 - chances
    above = np.concatenate([[0.0], np.cumsum(misses)[:-1]])
    return float((chances * above).sum() / (chances.sum() * misses.sum() - (chances * misses).sum()))


def _dials(given: Mapping[str, float | None]) -> Dials:
    names = [field.name for field in fields(Dials)]
    for name in given:
        if name not in names:
            raise ConfigError(f"there is no dial {name!r}: choose one of {', '.join(names)}")
    return Dials(**given)  # type: ignore[arg-type]
