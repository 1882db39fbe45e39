"""Pages are well-formed, hold nothing from elsewhere, and show names of strangers as text."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.data import generated
from bagpipe.data.stats import measure
from bagpipe.data.stats_page import stats_page
from bagpipe.errors import ConfigError
from bagpipe.observe.charts import Axis, Series, bar_chart, count, line_chart, percent, share_chart
from bagpipe.observe.page import Page, shown
from harness.examples import examples

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "<script>alert('x')</script> & \"quotes\" \x00\x1b\ud800"


def parsed(page):
    return ElementTree.fromstring(page.html().encode())


def texts(tree):
    return [text for element in tree.iter() for text in (element.text or "",) if text.strip()]


def places(chart, kind):
    return [element for element in ElementTree.fromstring(chart.svg).iter() if kind in element.get("class", "").split()]


def test_the_page_of_a_data_set_is_well_formed_and_has_its_figures():
    stats = measure(generated("tiny", 5000))
    tree = parsed(stats_page("Data: tiny", stats))
    assert len(list(tree.iter(f"{SVG}svg"))) == 6
    said = texts(tree)
    assert f"{stats.whole.unique_rows:,}" in said
    assert f"{stats.whole.top_share['1%']:.1%}" in said
    assert {"user", "item", "city", "device"} <= set(said)


def test_a_page_asks_for_nothing_from_elsewhere():
    made = stats_page("Data: tiny", measure(generated("tiny", 500)))
    policy = parsed(made).find("head/meta[@http-equiv='Content-Security-Policy']")
    assert policy.get("content").startswith("default-src 'none'; style-src 'unsafe-inline';")
    page = made.html()
    for word in ("<script", "src=", "href=", "url(", "@import", 'http-equiv="refresh"'):
        assert word not in page
    assert page.replace("http://www.w3.org/2000/svg", "").count("http:") == 0


def test_names_are_shown_as_text_whatever_they_are():
    page = Page(HOSTILE, HOSTILE)
    page.section(HOSTILE, HOSTILE)
    page.tiles({HOSTILE: HOSTILE})
    page.table(HOSTILE, [HOSTILE, HOSTILE], [[HOSTILE, HOSTILE]])
    axis = Axis(HOSTILE, ticks=[(0, HOSTILE), (1, HOSTILE)])
    line = line_chart(HOSTILE, [Series(HOSTILE, [(0, 1), (1, 2)])], axis, Axis(HOSTILE), HOSTILE)
    page.charts(line, bar_chart(HOSTILE, [HOSTILE], [Series(HOSTILE, [(0, 1)])], Axis(HOSTILE), HOSTILE))
    html = page.html(HOSTILE)
    assert "<script" not in html
    tree = parsed(page)
    assert not list(tree.iter("script"))
    assert tree.find("body/main/h1").text == "<script>alert('x')</script> & \"quotes\" \\x00\\x1b\\ud800"


numbers = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True), st.integers(-(10**15), 10**15))


@examples(100)
@given(
    st.lists(st.lists(st.tuples(st.integers(-5, 10**6), numbers), max_size=5), max_size=3), st.booleans(), st.booleans()
)
def test_any_numbers_give_a_picture(lines, log_x, log_y):
    series = [Series(f"line {n}", points) for n, points in enumerate(lines)]
    chart = line_chart("numbers", series, Axis("x", log=log_x), Axis("y", log=log_y))
    assert "nan" not in chart.svg
    assert "inf" not in chart.svg
    ElementTree.fromstring(chart.svg)
    bars = [Series(each.name, [(i, value) for i, (_, value) in enumerate(each.points)]) for each in series]
    ElementTree.fromstring(bar_chart("numbers", ["a"] * 5, bars, Axis("y", log=log_y)).svg)


EXTREME = [(-1.7e308, 1.7e308), (1e-320, 1e-318), (5e-324, 1.0), (1e308, 1.7e308), (1e15, 1e15)]


@pytest.mark.parametrize("values", EXTREME)
@pytest.mark.parametrize("log", [False, True])
def test_extreme_numbers_give_a_picture(values, log):
    chart = line_chart("extreme", [Series("a", list(enumerate(values)))], Axis("x"), Axis("y", log=log))
    assert "nan" not in chart.svg
    assert "inf" not in chart.svg


def test_lines_go_through_their_points_and_break_at_gaps():
    series = [Series("a", [(0, 0), (1, 5), (2, None), (3, 10), (4, 10)])]
    chart = line_chart("a", series, Axis("x"), Axis("y"))
    path = places(chart, "line")[-1].get("d")
    assert path.count("M") == 2
    dots = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in places(chart, "dot")]
    assert [x for x, _ in dots] == sorted(x for x, _ in dots)
    assert dots[0][1] > dots[1][1] > dots[2][1] == dots[3][1]
    assert dots[0][1] - dots[1][1] == pytest.approx(dots[1][1] - dots[2][1], abs=0.2)


def test_every_point_and_bar_tells_its_value():
    chart = share_chart("s", [Series("all", [(0.001, 0.5), (1, 1)])], "share of rows", "share of accesses")
    titles = [element.text for element in ElementTree.fromstring(chart.svg).iter(f"{SVG}title")]
    assert titles == [
        "all\nshare of rows: 0.1%\nshare of accesses: 50%",
        "all\nshare of rows: 100%\nshare of accesses: 100%",
    ]
    chart = bar_chart("b", ["a table with a very long name"], [Series("rows", [(0, 1234)])], Axis("rows"))
    titles = [element.text for element in ElementTree.fromstring(chart.svg).iter(f"{SVG}title")]
    assert titles == ["a table with a very long name", "a table with a very long name\nrows: 1.23 K"]


def test_logarithmic_axes_have_powers_of_ten():
    chart = share_chart("s", [Series("all", [(0.0003, 0.1), (1, 1)])], "rows", "accesses")
    said = [element.text for element in ElementTree.fromstring(chart.svg).iter(f"{SVG}text")]
    assert {"0.01%", "0.1%", "1%", "10%", "100%"} <= set(said)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (950, "950"), (1024, "1.02 K"), (2.5e6, "2.5 M"), (3e9, "3 G"), (-5e3, "-5 K")]
)
def test_counts_on_axes_are_short(value, text):
    assert count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0%"), (1e-7, "0.00001%"), (0.001, "0.1%"), (0.672, "67.2%"), (1, "100%"), (0.4, "40%")],
)
def test_shares_on_axes_are_percentages(value, text):
    assert percent(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (1234567, "1,234,567"), (1234.5, "1,234"), (0.12345, "0.1235"), ("a", "a")]
)
def test_cells_are_shown_as_people_read_them(value, text):
    assert shown(value) == text


def test_a_page_is_saved_or_the_error_names_the_file(tmp_path):
    Page("title").save(tmp_path / "page.html", "the end")
    assert (tmp_path / "page.html").read_text().endswith("<footer>the end</footer></main></body></html>\n")
    with pytest.raises(ConfigError, match="can't be written"):
        Page("title").save(tmp_path / "nowhere" / "page.html")
