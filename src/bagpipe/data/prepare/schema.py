"""What the columns of raw files are: label, numbers, categories, time; from a small TOML file or built in.

What is wrong with a schema by itself is found here (I8); whether a file has its columns, when the file is opened.
"""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from bagpipe.bounded import check_settings, first_lines, read_toml, shown
from bagpipe.errors import ConfigError, DataError

Name = Annotated[str, Field(min_length=1, max_length=200)]


def _from_name(value: Any) -> Any:
    """A column that needs no more than its name may be given as that name."""
    return {"column": value} if isinstance(value, str) else value


class Record(BaseModel):
    """A checked, unchangeable part of a schema; unknown settings are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class Label(Record):
    """The column to be predicted: 0 or 1."""

    column: Name
    """Its name in the file."""
    at_least: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """The label is 1 where the value is at least this and 0 elsewhere; not given: the column has 0 and 1 itself."""


class Numeric(Record):
    """A column of numbers; a missing one is 0."""

    column: Name
    """Its name in the file."""
    transform: Literal["log", "none", "hour_of_day"] = "log"
    """log: ln(1 + max(x, 0)); none: as it is; hour_of_day: hour of the time column / 24."""


class Categorical(Record):
    """A column of categories, each of which has a row in a table."""

    column: Name
    """Its name in the file, and of the feature."""
    table: Name | None = None
    """Columns with the same table share its rows; not given: a table of the column's own name."""
    kind: Literal["text", "integer"] | None = None
    """How values are told apart: as text ('7' and '07' differ) or as 64-bit whole numbers. Not given: as the file has
    them, which is text in TSV and CSV."""
    separator: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    """In TSV and CSV: a cell is a list of values with this between them, such as 'Action|Comedy'; an empty cell is an
    empty list. Parquet knows by itself which columns are lists."""

    @property
    def table_name(self) -> str:
        """The table that its values are rows of."""
        return self.table or self.column


class Time(Record):
    """When a sample was taken."""

    column: Name
    """Its name in the file."""
    kind: Literal["unix", "unix_ms", "yymmddhh", "iso"] = "unix"
    """unix: seconds since 1970; unix_ms: milliseconds; yymmddhh: as Avazu has it, 14102100; iso: 2014-10-21T00:00:00,
    in UTC unless it says otherwise. Timestamps of parquet are read as what they are."""


class Schema(Record):
    """What raw files hold. A column of the file that appears nowhere is an error, so that none is forgotten."""

    format: Literal["tsv", "csv", "parquet"]
    """tsv and csv: one sample a line; in csv a cell may be in double quotes, but not go on in the next line."""
    separator: Annotated[str, Field(min_length=1, max_length=4)] | None = None
    """Between the cells of a line; not given: tab for tsv, comma for csv."""
    columns: tuple[Name, ...] = ()
    """Names of the columns, in order, of text files without a header; not given: the first line has them."""
    label: Annotated[Label, BeforeValidator(_from_name)]
    """A column, or {column, at_least}."""
    numeric: tuple[Annotated[Numeric, BeforeValidator(_from_name)], ...] = ()
    """Columns, or {column, transform}."""
    categorical: Annotated[tuple[Annotated[Categorical, BeforeValidator(_from_name)], ...], Field(min_length=1)]
    """Columns, or {column, table, kind, separator}."""
    time: Annotated[Time, BeforeValidator(_from_name)] | None = None
    """A column, or {column, kind}."""
    sort: bool = False
    """The samples are not in order of time and must be put in it; needs `time`."""
    ignore: tuple[Name, ...] = ()
    """Columns to leave out; `*` and `?` stand for any text and any character: ["*"] leaves out all the others."""
    missing: tuple[Name, ...] = ()
    """Texts, beside the empty one, that mean that there is no value, such as ["NULL", "?"]."""
    files: tuple[Name, ...] = ()
    """Which files of a directory are meant, by patterns such as "train*"; not given: all, or *.parquet and *.pq."""

    @model_validator(mode="after")
    def _consistent(self) -> Schema:
        self._check_roles()
        self._check_text()
        if self.sort and self.time is None:
            raise ValueError("sort is true but no time column is given: give time, or leave sort out")
        kinds: dict[str, Categorical] = {}
        for column in self.categorical:
            other = kinds.setdefault(column.table_name, column)
            if other.kind != column.kind:
                raise ValueError(
                    f"columns {other.column!r} and {column.column!r} share table {column.table_name!r} but not their "
                    f"kind ({other.kind} and {column.kind}): give both the same"
                )
        return self

    def _check_roles(self) -> None:
        derived = [column for column in self.numeric if column.transform == "hour_of_day"]
        for column in derived:
            if self.time is None or self.time.column != column.column:
                raise ValueError(f"numeric column {column.column!r} has hour_of_day but is not the time column")
        roles = [self.label.column, *(column.column for column in self.numeric if column not in derived)]
        roles += [column.column for column in self.categorical]
        roles += [self.time.column] if self.time is not None else []
        twice = sorted({name for name in roles if roles.count(name) > 1})
        if len(derived) > 1 or twice:
            name = twice[0] if twice else derived[0].column
            raise ValueError(f"column {name!r} appears twice: a column is a label, a number, a category or a time")
        lost = sorted(name for name in self.columns if name in self.ignore and name in roles)
        if lost:
            raise ValueError(f"column {lost[0]!r} is used and in ignore: take it out of one of them")

    def _check_text(self) -> None:
        if self.format == "parquet":
            given = [name for name in ("separator", "columns") if getattr(self, name)]
            given += [f"separator of {column.column!r}" for column in self.categorical if column.separator]
            if given:
                raise ValueError(f"{given[0]} is for tsv and csv; parquet files say it themselves: leave it out")
            return
        texts = [self.cell_separator, *(column.separator for column in self.categorical if column.separator)]
        wrong = [text for text in texts if not text.isascii() or set(text) & set('\r\n"')]
        if wrong:
            raise ValueError(f"separator {wrong[0]!r}: give ASCII characters, no quote and no line end")
        if len(set(self.columns)) < len(self.columns):
            twice = next(name for name in self.columns if self.columns.count(name) > 1)
            raise ValueError(f"columns names {twice!r} twice: give each column a name of its own")
        if self.columns:
            self.check_columns(self.columns, "columns", ValueError)

    @property
    def cell_separator(self) -> str:
        """What is between the cells of a line."""
        return self.separator or ("\t" if self.format == "tsv" else ",")

    @property
    def file_patterns(self) -> tuple[str, ...]:
        """Which files of a directory are meant."""
        return self.files or (("*.parquet", "*.pq") if self.format == "parquet" else ("*",))

    @property
    def tables(self) -> dict[str, tuple[str, ...]]:
        """The categorical columns of each table, both in the order of the schema."""
        tables: dict[str, tuple[str, ...]] = {}
        for column in self.categorical:
            tables[column.table_name] = (*tables.get(column.table_name, ()), column.column)
        return tables

    @property
    def used(self) -> tuple[str, ...]:
        """The columns that are read: label, numeric, categorical, time, each once."""
        names = [self.label.column, *(column.column for column in self.numeric)]
        names += [column.column for column in self.categorical]
        names += [self.time.column] if self.time is not None else []
        return tuple(dict.fromkeys(names))

    def check_columns(self, there: tuple[str, ...], where: str, error: type[Exception] = DataError) -> None:
        """See that a file has every column of the schema, each once, and none that the schema does not mention."""
        listed = ", ".join(there)
        for name in self.used:
            if there.count(name) != 1:
                found = f"has {there.count(name)} columns" if name in there else "has no column"
                raise error(f"{where} {found} {name!r}, which the schema names; it has: {listed}")
        for name in there:
            if name not in self.used and not any(fnmatchcase(name, pattern) for pattern in self.ignore):
                raise error(
                    f"{where} has a column {name!r} that the schema does not mention: give it a role, or add it to "
                    f"ignore (['*'] stands for all the others); it has: {listed}"
                )


def load_schema(path: Path) -> Schema:
    """The schema in a TOML file."""
    return parse_schema(read_toml(path, "schema"), str(path))


def parse_schema(settings: dict[str, Any], where: str = "schema") -> Schema:
    """The schema of nested settings, checked."""
    check_settings(settings, where, ConfigError)
    try:
        return Schema.model_validate_json(json.dumps(settings, default=str))
    except ValidationError as error:
        raise ConfigError(first_lines([f"{where}: {_explain(detail)}" for detail in error.errors()])) from None


def _explain(detail: Any) -> str:
    field = ".".join(str(part) for part in detail["loc"] if not str(part).startswith("function-"))
    if detail["type"] == "extra_forbidden":
        return f"{field}: there is no such setting"
    message = str(detail["msg"]).removeprefix("Value error, ")
    given = "" if isinstance(detail["input"], dict) else f" (it is {shown(detail['input'])})"
    return f"{field}: {message}{given}" if field else message
