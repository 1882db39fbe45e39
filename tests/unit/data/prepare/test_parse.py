import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.data.prepare.block import Place
from bagpipe.data.prepare.builtin import AVAZU, CRITEO, builtin_schema
from bagpipe.data.prepare.parse import TextParser
from bagpipe.data.prepare.schema import parse_schema
from bagpipe.data.prepare.text import Piece
from bagpipe.data.prepare.texts import hash_texts
from harness.blocks import problems_of, samples_of, values_of
from harness.examples import examples

SMALL = {"format": "csv", "columns": ["y", "n", "c"], "label": "y", "numeric": ["n"], "categorical": ["c"]}


def parse(text, schema=None, **settings):
    schema = schema or parse_schema({**SMALL, **settings})
    data = text if isinstance(text, bytes) else text.encode()
    lines = data.count(b"\n") + (not data.endswith(b"\n"))
    piece = Piece(data, Place(0, 1000, 10), Place(0, 1000 + len(data), 10 + lines), 0)
    return TextParser(schema, "f.csv", schema.columns).parse(piece)


def problem(text, **settings):
    """What is said of the second of three lines; the two others must give samples."""
    before = b"1,2,before\n" if "categorical" not in settings else b"1,2,1\n"
    block = parse(before + (text if isinstance(text, bytes) else text.encode()) + b"\n" + before, **settings)
    assert len(block) == 2
    [found] = block.problems
    assert (found.file, found.line) == ("f.csv", 12)
    return found.column, found.reason


def test_a_line_with_too_few_or_too_many_columns_is_a_problem_of_the_line():
    assert problem("1,2") == (None, "has 2 columns, 3 expected")
    assert problem("1") == (None, "has 1 column, 3 expected")
    assert problem("1,2,a,") == (None, "has 4 columns, 3 expected")


def test_text_where_a_number_should_be_is_named_by_column_and_value():
    assert problem("1,abc,x") == ("n", "'abc' is not a number")
    assert problem("1,nan,x") == ("n", "'nan' is not a number")
    assert problem("1,1e999,x") == ("n", "'1e999' is not a number")
    assert problem("1," + "z" * 100 + ",x") == ("n", "'" + "z" * 60 + "...' is not a number")
    assert problem("1,1e39,x", numeric=[{"column": "n", "transform": "none"}]) == (
        "n",
        "'1e39' is too large for a 32-bit number",
    )


def test_a_label_that_is_missing_or_not_0_or_1_is_a_problem():
    assert problem("2,1,x") == ("y", "'2' is not 0 or 1")
    assert problem("-1,1,x") == ("y", "'-1' is not 0 or 1")
    assert problem("0.5,1,x") == ("y", "'0.5' is not 0 or 1")
    assert problem("yes,1,x") == ("y", "'yes' is not a number")
    assert problem(",1,x") == ("y", "the label is missing")


def test_bytes_that_are_not_utf8_are_a_problem_of_their_column():
    assert problem(b"1,2,caf\xe9") == ("c", "'caf\\xe9' is not UTF-8")
    assert problem(b"1,\xff,x\xff") == ("n", "'\\xff' is not UTF-8")


def test_bytes_that_are_not_utf8_in_a_column_that_is_not_used_are_no_problem():
    schema = parse_schema(
        {"format": "csv", "columns": ["y", "c", "note"], "label": "y", "categorical": ["c"], "ignore": ["*"]}
    )
    block = parse(b"1,a,caf\xe9\n0,b,\n", schema)
    assert len(block) == 2
    assert block.problems == ()


def test_a_category_that_is_no_whole_number_is_a_problem_where_one_is_wanted():
    categorical = [{"column": "c", "kind": "integer"}]
    for text in ("x", "1.5", "9223372036854775808"):
        assert problem(f"1,2,{text}", categorical=categorical) == ("c", f"{text!r} is not a whole number of 64 bits")


def test_quotes_that_do_not_end_as_they_should_are_a_problem_of_the_line():
    assert problem('1,2,"open')[1].startswith("a quote is not closed in this line")
    assert problem('1,2,"a"b') == (None, "text follows the closing quote of a cell")
    assert problem('1,"2"x,c') == (None, "text follows the closing quote of a cell")


def test_of_several_faults_of_a_line_the_first_in_the_file_is_named():
    assert problem("5,abc,x") == ("y", "'5' is not 0 or 1")
    columns = {"columns": ["c", "n", "y"]}
    block = parse("x,abc,5\n", **columns)
    assert [(p.column, p.reason) for p in block.problems] == [("n", "'abc' is not a number")]


def test_the_text_of_a_problem_is_the_line_as_it_stands():
    block = parse(b'1,x,"a""b"\r\n0,2,c\n1,y,z')
    assert [p.text for p in block.problems] == [b'1,x,"a""b"', b"1,y,z"]
    assert [p.line for p in block.problems] == [11, 13]
    assert len(block) == 1


def test_lines_without_any_sample_give_a_block_of_problems():
    block = parse("x\ny\n")
    assert len(block) == 0
    assert block.dense.shape == (0, 1)
    assert len(block.problems) == 2
    assert values_of(block.categories["c"]) == []


@given(bad=st.sets(st.integers(0, 39)))
@examples(30)
def test_bad_lines_anywhere_cost_no_good_neighbour(bad):
    faults = ["1,2", "1,x,c", b"1,2,\xff", '1,2,"', "7,2,c"]
    lines = [faults[n % 5] if n in bad else f"{n % 2},{n},v{n}" for n in range(40)]
    block = parse(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    good = [n for n in range(40) if n not in bad]
    assert [sample[2] for sample in samples_of([block])] == [[f"v{n}"] for n in good]
    assert [p.line for p in block.problems] == [n + 11 for n in sorted(bad)]


def test_numbers_are_transformed_and_missing_ones_are_zero():
    block = parse("1,,a\n1,0,a\n1,-5,a\n1,1382,a\n1, 2.5 ,a\n")
    expected = np.log1p([0, 0, 0, 1382, 2.5]).astype(np.float32)
    assert block.dense[:, 0].tolist() == expected.tolist()
    plain = parse("1,,a\n1,-5,a\n1,1e3,a\n", numeric=[{"column": "n", "transform": "none"}])
    assert plain.dense[:, 0].tolist() == [0, -5, 1000]
    assert (block.labels.dtype, block.dense.dtype) == (np.float32, np.float32)


def test_a_threshold_makes_labels_of_ratings():
    block = parse("4,1,a\n3.5,1,a\n5,1,a\n-1,1,a\n", label={"column": "y", "at_least": 4})
    assert block.labels.tolist() == [1, 0, 1, 0]


def test_categories_have_their_text_a_stable_key_and_a_mark_where_missing():
    block = parse('1,1,a\n1,1,\n1,1,"x,y"\n1,1,"say ""hi"""\n1,1,""\n1,1,é\n')
    category = block.categories["c"]
    assert values_of(category) == ["a", None, "x,y", 'say "hi"', None, "é"]
    assert category.values.type == pa.string()
    category.values.validate(full=True)
    keys, checks = hash_texts(category.values)
    assert (category.keys.tolist(), category.checks.tolist()) == (keys.tolist(), checks.tolist())
    assert category.keys[1] == category.checks[1] == 0


def test_categories_of_whole_numbers_are_their_own_keys():
    block = parse("1,1,7\n1,1,\n1,1,-1\n1,1,007\n", categorical=[{"column": "c", "kind": "integer"}])
    category = block.categories["c"]
    assert values_of(category) == [7, None, -1, 7]
    assert category.keys.tolist() == [7, 0, 2**64 - 1, 7]
    assert not category.checks.any()


def test_lists_have_any_number_of_values():
    text = "1,1,Action|Comedy\n1,1,\n1,1,Drama\n1,1,a||b\n"
    block = parse(text, categorical=[{"column": "c", "separator": "|"}])
    assert values_of(block.categories["c"]) == [["Action", "Comedy"], [], ["Drama"], ["a", None, "b"]]
    numbers = parse("1,1,3|4\n1,1,5|x\n1,1,\n", categorical=[{"column": "c", "separator": "|", "kind": "integer"}])
    assert values_of(numbers.categories["c"]) == [[3, 4], []]
    assert [(p.column, p.reason) for p in numbers.problems] == [("c", "'5|x' is not a whole number of 64 bits")]


def test_other_texts_can_mean_missing():
    block = parse("1,NULL,?\n1,2,NULL\n1,2,NUL\n", missing=["NULL", "?"])
    assert values_of(block.categories["c"]) == [None, None, "NUL"]
    assert block.dense[0, 0] == 0
    lists = parse("1,1,a|?|b\n1,1,?\n", missing=["?"], categorical=[{"column": "c", "separator": "|"}])
    assert values_of(lists.categories["c"]) == [["a", None, "b"], []]


@pytest.mark.parametrize(
    ("kind", "text", "seconds"),
    [
        ("unix", "978300760", 978300760),
        ("unix", "978300760.9", 978300760),
        ("unix", "-0.5", -1),
        ("unix_ms", "978300760999", 978300760),
        ("yymmddhh", "14102100", 1413849600),
        ("iso", "2014-10-21T00:00:01Z", 1413849601),
    ],
)
def test_times_are_seconds_since_1970(kind, text, seconds):
    schema = {"columns": ["y", "c", "t"], "numeric": [], "time": {"column": "t", "kind": kind}}
    block = parse(f"1,a,{text}\n1,a,\n1,a,soon\n", **schema)
    assert block.times.tolist() == [seconds]
    assert [p.reason for p in block.problems] == ["the time is missing", f"'soon' is not a time of the kind {kind}"]


def test_a_line_of_criteo_is_a_label_13_logarithms_and_26_categories():
    ints = ["1", "-2", "", *map(str, range(10))]
    cats = [f"{n:08x}" if n % 5 else "" for n in range(26)]
    block = parse("\t".join(["1", *ints, *cats]), CRITEO)
    assert block.labels.tolist() == [1]
    assert block.dense.shape == (1, 13)
    assert block.dense[0, :4].tolist() == [np.float32(np.log(2)), 0, 0, 0]
    assert [values_of(block.categories[f"C{n + 1}"])[0] for n in range(26)] == [cat or None for cat in cats]


def test_a_line_of_avazu_has_the_hour_of_its_day_as_its_number():
    schema = AVAZU.model_copy(update={"columns": ("id", "click", "hour", *(c.column for c in AVAZU.categorical))})
    block = parse(",".join(["1", "0", "14102118", *(f"v{n}" for n in range(21))]), schema)
    assert block.dense.tolist() == [[18 / 24]]
    assert block.times.tolist() == [1413849600 + 18 * 3600]


@pytest.mark.parametrize("separator", ["::", "\t"])
def test_older_ratings_of_movielens_are_read(separator):
    lines = [separator.join(cells) for cells in (("1", "1193", "5", "978300760"), ("2", "661", "3", "978302109"))]
    block = parse("\n".join(lines), builtin_schema("movielens", lines[0].encode()))
    assert block.labels.tolist() == [1, 0]
    assert [values_of(block.categories[name]) for name in ("userId", "movieId")] == [[1, 2], [1193, 661]]
    assert block.times.tolist() == [978300760, 978302109]
    assert problems_of([block]) == []
