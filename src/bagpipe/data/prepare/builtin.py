"""The schemas of data sets that many people have: Criteo's and Avazu's click logs, and MovieLens' ratings."""

from __future__ import annotations

from bagpipe.data.prepare.schema import Categorical, Label, Numeric, Schema, Time
from bagpipe.errors import ConfigError

CRITEO = Schema(
    format="tsv",
    columns=("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))),
    label=Label(column="label"),
    numeric=tuple(Numeric(column=f"I{i}") for i in range(1, 14)),
    categorical=tuple(Categorical(column=f"C{i}") for i in range(1, 27)),
    files=("train*", "day_*"),
)
"""Criteo Kaggle (train.txt) and Terabyte (day_0 to day_23): 40 columns, no header."""

AVAZU = Schema(
    format="csv",
    label=Label(column="click"),
    numeric=(Numeric(column="hour", transform="hour_of_day"),),
    categorical=tuple(
        Categorical(column=name)
        for name in (
            *("C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category"),
            *("device_id", "device_ip", "device_model", "device_type", "device_conn_type"),
            *(f"C{i}" for i in range(14, 22)),
        )
    ),
    time=Time(column="hour", kind="yymmddhh"),
    ignore=("id",),
    files=("train*",),
)
"""Avazu (train.csv, train.gz). Without id, click and hour there are 21 columns, all of them codes; so the one number
that the Bagpipe paper counts beside its 21 categories is taken to be the hour, here as the hour of the day."""

_RATINGS = ("userId", "movieId", "rating", "timestamp")
MOVIELENS = Schema(
    format="csv",
    label=Label(column="rating", at_least=4),
    categorical=tuple(Categorical(column=name, kind="integer") for name in _RATINGS[:2]),
    time=Time(column="timestamp"),
    sort=True,
    files=("ratings.csv*", "ratings.dat*", "u.data*"),
)
"""MovieLens ratings of any year; 4 stars and more are positive. The files are in order of users, not of time."""

BUILTIN = {"criteo": CRITEO, "avazu": AVAZU, "movielens": MOVIELENS}


def builtin_schema(name: str, first_line: bytes = b"") -> Schema:
    """A built-in schema; MovieLens' older files, told by their first line, have other separators and no header."""
    if name not in BUILTIN:
        raise ConfigError(f"there is no built-in schema {name!r}: give one of {', '.join(BUILTIN)}, or a schema file")
    schema = BUILTIN[name]
    if name == "movielens" and first_line[:1].isdigit():
        separator = "::" if b"::" in first_line else "\t" if b"\t" in first_line else ","
        schema = schema.model_copy(update={"separator": separator, "columns": _RATINGS})
    return schema
