import pytest

from bagpipe.data.prepare.builtin import AVAZU, BUILTIN, CRITEO, MOVIELENS, builtin_schema
from bagpipe.data.prepare.schema import Schema, load_schema, parse_schema
from bagpipe.errors import ConfigError, DataError

SMALL = {"format": "csv", "label": "y", "categorical": ["c"]}


def refused(match, **settings):
    with pytest.raises(ConfigError, match=match):
        parse_schema({**SMALL, **settings})


def test_a_schema_is_read_from_toml_with_names_alone_where_they_suffice(tmp_path):
    path = tmp_path / "schema.toml"
    path.write_text(
        """
        format = "csv"
        label = {column = "rating", at_least = 4}
        numeric = ["price", {column = "age", transform = "none"}]
        categorical = [
            "user", {column = "item", table = "things"}, {column = "seen", table = "things", separator = "|"}
        ]
        time = {column = "when", kind = "iso"}
        ignore = ["note*"]
        """
    )
    schema = load_schema(path)
    assert schema.label.at_least == 4
    assert [(column.column, column.transform) for column in schema.numeric] == [("price", "log"), ("age", "none")]
    assert schema.tables == {"user": ("user",), "things": ("item", "seen")}
    assert schema.used == ("rating", "price", "age", "user", "item", "seen", "when")
    assert Schema.model_validate_json(schema.model_dump_json()) == schema


def test_a_schema_that_is_not_there_or_not_toml_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"can't read the schema .*none\.toml"):
        load_schema(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("label = ")
    with pytest.raises(ConfigError, match=r"bad\.toml is not TOML"):
        load_schema(tmp_path / "bad.toml")


def test_what_contradicts_itself_is_refused_by_name():
    refused("sepparator: there is no such setting", sepparator=";")
    refused(r"categorical\.0\.kinds: there is no such setting", categorical=[{"column": "c", "kinds": "text"}])
    refused("column 'c' appears twice", numeric=["c"])
    refused("column 'y' appears twice", categorical=["c", "y"])
    refused("'n' has hour_of_day but is not the time column", numeric=[{"column": "n", "transform": "hour_of_day"}])
    refused("sort is true but no time column", sort=True)
    refused("categorical: .*at least 1 item", categorical=[])
    refused("format", format="xml")
    refused("transform.*sqrt", numeric=[{"column": "n", "transform": "sqrt"}])
    refused("at_least", label={"column": "y", "at_least": "4"})
    refused("separator '\\\\n'", separator="\n")
    refused("separator 'é'", separator="é")
    refused("columns names 'y' twice", columns=["y", "c", "y"])
    refused("columns has no column 'c'", columns=["y", "d"])
    refused("columns has a column 'd' that the schema does not mention", columns=["y", "c", "d"])
    refused("'c' is used and in ignore", columns=["y", "c"], ignore=["c"])
    refused(
        "share table 't' but not their kind",
        categorical=[{"column": "c", "table": "t", "kind": "text"}, {"column": "d", "table": "t"}],
    )
    refused("separator of 'c' is for tsv and csv", format="parquet", categorical=[{"column": "c", "separator": "|"}])
    refused("columns is for tsv and csv", format="parquet", columns=["y", "c"])


def test_a_file_must_have_each_column_once_and_no_unknown_one():
    schema = parse_schema({**SMALL, "ignore": ["x*"]})
    schema.check_columns(("x1", "c", "y", "x2"), "f.csv")
    with pytest.raises(DataError, match=r"f\.csv has no column 'y', which the schema names; it has: c, x1"):
        schema.check_columns(("c", "x1"), "f.csv")
    with pytest.raises(DataError, match="has 2 columns 'c'"):
        schema.check_columns(("c", "y", "c"), "f.csv")
    with pytest.raises(DataError, match="has a column 'z' that the schema does not mention"):
        schema.check_columns(("c", "y", "z"), "f.csv")


def test_the_built_in_schemas_have_the_columns_that_the_data_sets_have():
    assert len(CRITEO.columns) == 40
    assert (len(CRITEO.numeric), len(CRITEO.categorical)) == (13, 26)
    assert (len(AVAZU.numeric), len(AVAZU.categorical)) == (1, 21)
    assert MOVIELENS.used == ("rating", "userId", "movieId", "timestamp")
    for schema in BUILTIN.values():
        assert Schema.model_validate_json(schema.model_dump_json()) == schema


def test_older_files_of_movielens_are_known_by_their_first_line():
    assert builtin_schema("movielens", b"userId,movieId,rating,timestamp") is MOVIELENS
    assert builtin_schema("movielens", b"1::1193::5::978300760").cell_separator == "::"
    assert builtin_schema("movielens", b"196\t242\t3\t881250949").cell_separator == "\t"
    old = builtin_schema("movielens", b"1::1193::5::978300760")
    assert old.columns == ("userId", "movieId", "rating", "timestamp")


def test_a_schema_that_is_not_built_in_is_refused():
    with pytest.raises(ConfigError, match="no built-in schema 'netflix': give one of criteo, avazu, movielens"):
        builtin_schema("netflix")
