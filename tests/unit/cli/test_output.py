"""What people see: tables that can be read in 80 columns, whatever a benchmark reports."""

import io

import pytest

from bagpipe.cli import output
from bagpipe.cli.output import PlainConsole, print_rows, show

WIDE = [
    {
        "optimizer": name,
        "batch_size": 256,
        "bagpipe_backward_update_ms": 0.5274123,
        "pytorch_backward_update_ms": ratio * 1000,
        "time_ratio_to_pytorch_with_oracle": ratio,
        "pytorch_forward_milliseconds": ratio + 1,
        "oracle_milliseconds_in_all": ratio + 2,
        "bagpipe_forward_milliseconds": ratio + 3,
        "reason": "the peer is not installed: install it with a command that is longer than most",
        "memory_bytes": 86_893_230,
    }
    for name, ratio in (("sgd", 0.2432123), ("adagrad", 2.7571))
]


@pytest.fixture
def printed(monkeypatch):
    """The lines that a call prints to a terminal of 80 columns."""

    def run(*arguments, width=80):
        text = io.StringIO()
        monkeypatch.setattr(output, "console", PlainConsole(width=width, file=text))
        print_rows(*arguments)
        return [line.rstrip() for line in text.getvalue().splitlines()]

    return run


def words(lines):
    return [line.split() for line in lines if line.strip()]


def test_a_table_that_fits_has_one_line_a_row(printed):
    lines = printed("policies", [{"policy": "lru", "rows": 1234567}, {"policy": "lookahead", "rows": 5}])
    assert words(lines)[0] == ["policies"]
    assert words(lines)[1] == ["policy", "rows"]
    assert words(lines)[-2:] == [["lru", "1,234,567"], ["lookahead", "5"]]
    assert lines[-2].index("5") > lines[-3].index("1"), "figures end under each other"


def test_what_does_not_fit_stands_and_names_what_is_common_once(printed):
    lines = printed("embedding", WIDE)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert text.count("batch size") == text.count("the peer is not installed") == 1
    assert ["optimizer", "sgd", "adagrad"] in words(lines)
    assert ["time", "ratio", "to", "pytorch", "with", "oracle", "0.2432", "2.757"] in words(lines)
    assert ["memory", "bytes", "86.9", "MB"] in words(lines)


def test_a_wide_terminal_gets_a_table_of_the_same(printed):
    lines = printed("embedding", WIDE, width=200)
    assert any(line.split()[:2] == ["sgd", "256"] for line in lines)


def test_many_results_stand_side_by_side_as_far_as_they_fit(printed):
    rows = [{"number": n} | {f"a_rather_long_name_{k}": n * 1_000_000 + k for k in range(12)} for n in range(1, 10)]
    lines = printed("many", rows)
    assert max(map(len, lines)) <= 80
    heads = [line.split()[1:] for line in lines if line.split()[:1] == ["number"]]
    assert [number for head in heads for number in head] == [str(n) for n in range(1, 10)]
    assert len(heads) > 1


def test_results_of_different_kinds_get_a_table_each(printed):
    rates = [{"measure": "a rate that is called so", "workers": n, "samples_per_second": 1.5} for n in (1, 2)]
    counts = [{"measure": "rows of a batch or of many", "value": n, "expected": 2.5, "published": 7} for n in (3, 4)]
    lines = printed("generator", rates + counts, width=60)
    assert max(map(len, lines)) <= 60
    assert sum("measure" in line for line in lines) == 2
    assert any(line.endswith("2.5           7") for line in lines)


def test_a_single_wide_result_is_a_list_of_names_and_values(printed):
    lines = printed("terabyte", WIDE[:1])
    assert ["optimizer", "sgd"] in words(lines)
    assert ["batch", "size", "256"] in words(lines)


def test_texts_are_not_taken_for_markup(printed):
    (line,) = [
        line for line in printed("list", [{"name": "peer", "how": "pip install 'bagpipe[bench]'"}]) if "pip" in line
    ]
    assert line.endswith("'bagpipe[bench]'")


@pytest.mark.parametrize(
    ("value", "name", "shown"),
    [
        (None, "", "-"),
        (True, "", "yes"),
        (1234567, "", "1,234,567"),
        (1234567.8, "", "1,234,568"),
        (0.123456, "", "0.1235"),
        (0.0000435468, "", "4.4e-05"),
        (0.0, "", "0"),
        (56_497_571_776, "table_bytes", "56.5 GB"),
        (16_777_216, "resident_bytes_max", "16.8 MB"),
        (512, "header_bytes", "512 B"),
        (113.078, "bytes_per_sample", "113.1"),
        ({"find": 1.0, "pool": 0.531234}, "", "find 1, pool 0.5312"),
        ("text", "", "text"),
    ],
)
def test_values_are_shown_with_sensible_digits(value, name, shown):
    assert show(value, name) == shown
