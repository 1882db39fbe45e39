"""The data sets that can be generated, by name: tables, features, and how popular their rows are.

`criteo-kaggle-like` is fitted to published counts (docs/data.md says how well). `avazu-like` and `criteo-terabyte-like`
reuse its laws; of their sizes only the totals are checked against a publication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from bagpipe.data.popularity import Popularity, PowerLaw, TopShare
from bagpipe.errors import ConfigError
from bagpipe.table import Table


@dataclass(frozen=True)
class Feature:
    """How the ids of one feature are drawn."""

    popularity: Popularity
    ids: int | tuple[int, int] = 1
    """Ids a sample; a pair draws bags of fewest to most."""
    weighted: bool = False
    follows: str | None = None
    """The feature, of one id, whose id decides the bag: a film always has the same genres."""
    effect: float = 1.0
    """How much the feature's rows say about the label, beside the other features."""

    @property
    def fewest(self) -> int:
        """Ids of the smallest bag."""
        return self.ids if isinstance(self.ids, int) else self.ids[0]

    @property
    def most(self) -> int:
        """Ids of the largest bag."""
        return self.ids if isinstance(self.ids, int) else self.ids[1]


@dataclass(frozen=True)
class Preset:
    """A data set that can be generated."""

    name: str
    summary: str
    tables: tuple[Table, ...]
    features: Mapping[str, Feature]
    """Of each feature of each table."""
    num_dense: int
    samples: int
    """Samples of the data set it resembles; as many are generated unless told otherwise."""
    ctr: float = 0.25
    """Share of labels that are 1."""
    spread: float = 1.45
    """Standard deviation of the hidden log-odds: decides the best AUC that any model can reach."""
    dense_effect: float = 1.4
    """How much a numeric feature says about the label, beside a feature of effect 1."""
    population: Mapping[str, int] = field(default_factory=dict)
    """Distinct ids that occur, for tables without a size."""
    drift: float = 0.0
    """Share of the ranks whose popularity goes to another row each day."""
    day_samples: int = 1 << 22

    def ranks(self, table: Table) -> int:
        """Number of rows that can occur."""
        return table.rows if table.rows is not None else self.population[table.name]

    def scaled(self, share: float) -> Preset:
        """The same data set with this share of the rows (at least 2 a table); the laws keep their parameters."""
        if not 0 < share <= 1:
            raise ConfigError(f"preset {self.name!r} scaled to a share of {share} of its rows: give a number in (0, 1]")
        tables = tuple(replace(t, rows=t.rows and min(t.rows, max(2, round(t.rows * share)))) for t in self.tables)
        population = {name: max(2, round(ranks * share)) for name, ranks in self.population.items()}
        return replace(self, name=f"{self.name}@{share:g}", tables=tables, population=population)

    def reshaped(self, popularity: Popularity) -> Preset:
        """The same data set with this law for every feature."""
        features = {name: replace(feature, popularity=popularity) for name, feature in self.features.items()}
        return replace(self, features=features)


LARGE_LAW = PowerLaw(exponent=1.49659, shift=42.614, uniform=0.1841)
"""Tables over a million rows, fitted to the cache sizes that Bagpipe's table 3 gives for lookaheads of 5 to 300."""
SMALL_LAW = PowerLaw(exponent=1.12262, shift=1.0)
LARGE_ROWS = 1_000_000

CRITEO_KAGGLE_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
CRITEO_TERABYTE_ROWS = (
    *(227605432, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 130229467, 3067956, 405282, 10),
    *(2209, 11938, 155, 4, 976, 14, 292775614, 40790948, 187188510, 590152, 12973, 108, 36),
)
AVAZU_ROWS = (
    *(("C1", 7), ("banner_pos", 7), ("site_id", 4737), ("site_domain", 7745), ("site_category", 26), ("app_id", 8552)),
    *(("app_domain", 559), ("app_category", 36), ("device_id", 2686408), ("device_ip", 6729486)),
    *(("device_model", 8251), ("device_type", 5), ("device_conn_type", 4), ("C14", 2626), ("C15", 8), ("C16", 9)),
    *(("C17", 435), ("C18", 4), ("C19", 68), ("C20", 172), ("C21", 60)),
)


def _fitted(rows: int) -> Feature:
    # Rows of the large tables are mostly seen once: an effect there can't be learned, so it stays small.
    return Feature(LARGE_LAW, effect=0.35) if rows > LARGE_ROWS else Feature(SMALL_LAW)


def _one_id_each(rows: Mapping[str, int]) -> tuple[tuple[Table, ...], dict[str, Feature]]:
    return tuple(Table(name, size) for name, size in rows.items()), {n: _fitted(size) for n, size in rows.items()}


def _criteo(name: str, summary: str, rows: Sequence[int], samples: int, day_samples: int) -> Preset:
    tables, features = _one_id_each({f"C{number}": size for number, size in enumerate(rows, start=1)})
    return Preset(name, summary, tables, features, num_dense=13, samples=samples, day_samples=day_samples)


def _avazu() -> Preset:
    tables, features = _one_id_each(dict(AVAZU_ROWS))
    summary = "Avazu: 21 tables, 9.4 M rows, popularity that drifts from day to day"
    return Preset("avazu-like", summary, tables, features, 1, 40_428_967, ctr=0.17, drift=0.06, day_samples=4_042_896)


def _movielens() -> Preset:
    tables = (Table("user", 162_541), Table("item", 62_423), Table("genre", 20, ("genres",)))
    features = {
        "user": Feature(PowerLaw(exponent=1.2, shift=2000.0), effect=0.7),
        "item": Feature(PowerLaw(exponent=1.4, shift=500.0)),
        "genres": Feature(PowerLaw(exponent=0.8, shift=1.0), ids=(1, 5), follows="item"),
    }
    summary = "MovieLens 25M: users, films, and the genres of the film as a bag"
    return Preset("movielens-like", summary, tables, features, 1, 25_000_095, ctr=0.5)


def _scratchpipe(locality: str, popularity: Popularity) -> Preset:
    tables = tuple(Table(f"T{number}", 10_000_000) for number in range(8))
    features = {table.name: Feature(popularity, ids=20) for table in tables}
    summary = f"ScratchPipe's trace of {locality} locality: 8 tables of 10 M rows, 20 ids each"
    return Preset(f"scratchpipe-{locality}", summary, tables, features, num_dense=13, samples=10_000_000)


def _tiny() -> Preset:
    law = PowerLaw(exponent=1.1, shift=1.0)
    tables = (Table("user", 1000), Table("item", 500, ("item", "recent")), Table("city", 20), Table("device"))
    features = {
        "user": Feature(law),
        "item": Feature(law),
        "recent": Feature(law, ids=(0, 5), weighted=True),
        "city": Feature(law),
        "device": Feature(law),
    }
    summary = "a few small tables for tests: a weighted bag, a shared table, a table without a size"
    return Preset(
        "tiny", summary, tables, features, num_dense=4, samples=20_000, population={"device": 3000}, day_samples=4000
    )


_ALL = (
    _criteo(
        "criteo-kaggle-like",
        "Criteo Kaggle: 26 tables, 33.8 M rows, fitted to published counts",
        CRITEO_KAGGLE_ROWS,
        samples=39_291_954,
        day_samples=5_613_136,
    ),
    _criteo(
        "criteo-terabyte-like",
        "Criteo Terabyte: 26 tables, 882.8 M rows",
        CRITEO_TERABYTE_ROWS,
        samples=4_373_472_329,
        day_samples=182_228_013,
    ),
    _avazu(),
    _movielens(),
    # The top 2 % of rows take 2, 8.5, 45 and 88 % of the draws. Sections III-A and III-B of the paper state 8.5 % and
    # "more than 80 %"; 88 is read from a miss rate of 12 % at a cache size that is not stated, 45 is ours. For the low
    # trace it says that 90 % of hits need more than 65 % of the rows: ours needs 65 %.
    _scratchpipe("random", PowerLaw(exponent=0.0)),
    _scratchpipe("low", PowerLaw(exponent=2.25, shift=3_351_000.0)),
    _scratchpipe("medium", PowerLaw(exponent=1.2, shift=40_092.0)),
    _scratchpipe("high", PowerLaw(exponent=1.2, shift=64.84)),
    _tiny(),
)
PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _ALL}


def find_preset(name: str) -> Preset:
    """The preset of this name."""
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


@dataclass(frozen=True)
class Dials:
    """What can be turned on any preset; a value of None leaves the preset as it is."""

    top_share: float | None = None
    """In every table the top 1 % of rows take this share of the draws, and the others are alike (0.01: no skew)."""
    zipf: float | None = None
    """In every table rank r has weight r^-zipf."""
    drift: float | None = None
    """Share of the ranks whose popularity goes to another row each day."""
    day_samples: int | None = None
    """Samples of a day."""
    burst: float = 0.0
    """Probability that an id repeats that of a sample shortly before."""
    burst_samples: int = 3 * 16_384
    """How far back a repeated id may lie, in samples."""

    def __post_init__(self) -> None:
        for name in ("drift", "burst"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"dial {name} is {value}: give a share from 0 to 1")
        for name in ("day_samples", "burst_samples"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < 1 << 32:
                raise ConfigError(f"dial {name} is {value}: give a number of samples from 1 to {(1 << 32) - 1}")
        if self.top_share is not None and self.zipf is not None:
            raise ConfigError("dials top_share and zipf both say how skewed the data are: give one of them")

    def turn(self, preset: Preset) -> Preset:
        """The preset with these dials; bursts are the generator's."""
        if self.top_share is not None:
            preset = preset.reshaped(TopShare(self.top_share))
        if self.zipf is not None:
            preset = preset.reshaped(PowerLaw(self.zipf))
        drift = preset.drift if self.drift is None else self.drift
        return replace(preset, drift=drift, day_samples=self.day_samples or preset.day_samples)
