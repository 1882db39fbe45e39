"""A data set as a few plain values, from which another process opens the same one: nothing is ever unpickled.

Also its fingerprint, by which saved positions tell whether they belong to the data at hand (I8).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from bagpipe.data.dataset import Dataset, IndexedDataset, Part
from bagpipe.data.generator import Generated
from bagpipe.data.manifest import VOCABULARY
from bagpipe.data.popularity import Popularity, PowerLaw, TopShare
from bagpipe.data.presets import Dials, Feature, Preset
from bagpipe.data.shards import Shards
from bagpipe.errors import ConfigError, ShardError
from bagpipe.table import Table

Description = dict[str, Any]
"""What `json` can write."""

LAWS: Mapping[str, type[PowerLaw] | type[TopShare]] = {"power_law": PowerLaw, "top_share": TopShare}


def describe(dataset: Dataset) -> Description:
    """What another process needs to open this data set; ConfigError if that can't be said in plain values."""
    if isinstance(dataset, Shards):
        return {"kind": "shards", "path": str(dataset.path.resolve()), "checksum": dataset.manifest.checksum}
    if isinstance(dataset, Generated):
        return {
            "kind": "generated",
            "preset": _describe_preset(dataset.preset),
            "samples": dataset.num_samples,
            "seed": dataset.seed,
            "dials": asdict(dataset.dials),
        }
    if isinstance(dataset, Part):
        start = dataset.start
        return {"kind": "part", "whole": describe(dataset.whole), "start": start, "stop": start + dataset.num_samples}
    raise ConfigError(
        f"a {type(dataset).__name__} is in the memory of this process, no other one can open it: "
        "leave processes at 0, or write the data as shards first (bagpipe.data.write)"
    )


def vocabularies(dataset: Dataset) -> dict[str, str]:
    """Of data that came from raw files, the files that say which value each row stands for: path to checksum."""
    if isinstance(dataset, Part):
        return vocabularies(dataset.whole)
    if not isinstance(dataset, Shards):
        return {}
    entries = [table.numbering.vocabulary for table in dataset.manifest.tables if table.numbering is not None]
    directory = dataset.path.resolve() / VOCABULARY
    return {str(directory / entry.file): str(entry.checksum) for entry in entries if entry is not None}


def open_described(description: Mapping[str, Any]) -> IndexedDataset:
    """The data set that was described."""
    kind = description.get("kind")
    if kind == "shards":
        shards = Shards(description["path"])
        if shards.manifest.checksum != description["checksum"]:
            raise ShardError(
                f"{shards.path} was replaced by other data while it was read (its manifest had checksum "
                f"{description['checksum']}, now {shards.manifest.checksum}): start again"
            )
        return shards
    if kind == "generated":
        return Generated(
            _open_preset(description["preset"]),
            description["samples"],
            description["seed"],
            Dials(**description["dials"]),
        )
    if kind == "part":
        return open_described(description["whole"]).part(description["start"], description["stop"])
    raise ConfigError(f"there is no kind of data set {kind!r}: give what bagpipe.data.describe returned")


def fingerprint(dataset: Dataset) -> str:
    """A short text that differs where the samples do; shards that were moved keep theirs.

    Of data in memory it knows names, sizes and numbers only.
    """
    return hashlib.sha256(json.dumps(_identity(dataset), sort_keys=True).encode()).hexdigest()[:16]


def _identity(dataset: Dataset) -> Description:
    if isinstance(dataset, Part):
        return {"whole": _identity(dataset.whole), "start": dataset.start, "samples": dataset.num_samples}
    if isinstance(dataset, Shards | Generated):
        return {key: value for key, value in describe(dataset).items() if key != "path"}
    return {
        "tables": [asdict(table) for table in dataset.tables],
        "dense": dataset.num_dense,
        "samples": dataset.num_samples,
    }


def _describe_preset(preset: Preset) -> Description:
    plain = asdict(preset)
    plain["features"] = {
        name: asdict(feature) | {"popularity": _describe_law(name, feature.popularity)}
        for name, feature in preset.features.items()
    }
    return plain


def _describe_law(feature: str, law: Popularity) -> Description:
    for name, kind in LAWS.items():
        if type(law) is kind:
            return {"law": name} | asdict(law)
    raise ConfigError(
        f"the ids of feature {feature!r} are drawn by a {type(law).__name__}, which can't be given to another "
        "process: leave processes at 0, or write the data as shards first (bagpipe.data.write)"
    )


def _open_preset(plain: Mapping[str, Any]) -> Preset:
    tables = tuple(Table(table["name"], table["rows"], tuple(table["features"])) for table in plain["tables"])
    features = {name: _open_feature(feature) for name, feature in plain["features"].items()}
    return Preset(**{**plain, "tables": tables, "features": features})


def _open_feature(plain: Mapping[str, Any]) -> Feature:
    law = dict(plain["popularity"])
    ids = plain["ids"] if isinstance(plain["ids"], int) else tuple(plain["ids"])
    return Feature(**{**plain, "popularity": LAWS[law.pop("law")](**law), "ids": ids})
