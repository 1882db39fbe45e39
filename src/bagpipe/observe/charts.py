"""Charts as inline SVG: lines and bars with readable axes, a legend, and a tooltip on every point.

Pure functions from numbers to text. Colours are classes that a page's style sheet fills in (`STYLE`), so one picture
serves light and dark screens; the palette can be told apart with any kind of colour vision, and dashes help.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from bagpipe.visible import visible

Number = int | float
Point = tuple[Number, Number | None]
"""A place and its value; None leaves a gap."""

WIDTH, HEIGHT = 640, 320
_TOP, _RIGHT, _BOTTOM, _LEFT = 14, 20, 46, 66
_LEGEND_LINE = 20
_CHARACTER = 6.4
"""Mean width of a character of the labels."""
_BAR, _BAR_GAP, _GROUP_GAP = 9, 1, 8
TICKS_MAX = 12
_LABELS_MAX = 16
"""Characters of a bar's name; the tooltip has all."""
NUM_COLOURS = 6

_LIGHT = ("#0b62a8", "#c8500a", "#0a7f5b", "#a43f86", "#7a6400", "#4a6fe3")
_DARK = ("#5aaeee", "#f2955a", "#3fc79b", "#e08cc6", "#d9bd4a", "#9db0ff")


def _variables(colours: Sequence[str]) -> str:
    return "".join(f"--series-{n}:{colour};" for n, colour in enumerate(colours))


STYLE = (
    f":root{{{_variables(_LIGHT)}}}@media (prefers-color-scheme:dark){{:root{{{_variables(_DARK)}}}}}"
    ".chart{display:block;width:100%;height:auto;font:12px system-ui,sans-serif;font-variant-numeric:tabular-nums}"
    ".chart text{fill:var(--muted)}.chart .name{fill:var(--ink)}"
    ".chart .grid{stroke:var(--line);stroke-width:1}.chart .axis{stroke:var(--muted);stroke-width:1}"
    ".chart .line{fill:none;stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round}"
    ".chart .dashed{stroke-dasharray:6 5}"
    ".chart .hit{fill:transparent;stroke:none}.chart g.point:hover .dot{r:5.5}.chart rect.bar:hover{opacity:.75}"
    + "".join(
        f".chart .s{n}{{stroke:var(--series-{n})}}.chart .f{n}{{fill:var(--series-{n})}}" for n in range(NUM_COLOURS)
    )
)
"""Style sheet of all charts; the page defines --ink, --muted and --line."""


def count(value: Number) -> str:
    """A number as an axis shows it: 950, 12 K, 3.5 M."""
    for factor, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " K")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def percent(value: Number) -> str:
    """A share as an axis shows it: 0.00001%, 0.1%, 40%."""
    value *= 100
    digits = 0 if not value or abs(value) >= 100 else 2 - math.floor(math.log10(abs(value)))
    text = f"{value:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text}%"


@dataclass(frozen=True, slots=True)
class Axis:
    """How one direction of a chart is laid out."""

    label: str
    log: bool = False
    show: Callable[[Number], str] = count
    """Value to text, for ticks and tooltips."""
    low: Number | None = None
    """Where it begins; by default at the smallest value, and at 0 upwards unless logarithmic."""
    high: Number | None = None
    ticks: Sequence[tuple[Number, str]] = ()
    """Places and their names, instead of round numbers."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or the bars of one colour."""

    name: str
    points: Sequence[Point]
    dashed: bool = False
    dots: bool = True
    """Mark every point of a line."""
    colour: int | None = None
    """Which of the six; by default its place among the series."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture with its title and a sentence on how to read it."""

    title: str
    svg: str
    note: str = ""


@dataclass(slots=True)
class _Scale:
    """From values to places on the picture."""

    axis: Axis
    low: float
    high: float
    start: float
    stop: float
    ticks: list[tuple[float, str]] = field(default_factory=list)

    def has(self, value: Number | None) -> bool:
        return value is not None and _drawable(value, self.axis)

    def place(self, value: Number) -> float:
        low, high, value = (math.log10(v) if self.axis.log else v for v in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.stop - self.start)


def line_chart(title: str, series: Sequence[Series], x: Axis, y: Axis, note: str = "", height: int = HEIGHT) -> Chart:
    """One line for each series, with a tooltip on every point."""
    legend, top = _legend(series, _TOP)
    points = [(px, py) for each in series for px, py in each.points if py is not None]
    across = _scale(x, [px for px, _ in points], _LEFT, WIDTH - _RIGHT, zero=False)
    up = _scale(y, [py for _, py in points], height - _BOTTOM, top, zero=True)
    parts = [*legend, *_horizontal_grid(up), *_x_ticks(across, height - _BOTTOM)]
    parts += _axis_names(x, y, top, height)
    for number, each in enumerate(series):
        parts += _line(each, _colour(each, number), across, up)
    return Chart(title, _svg(title, parts, height), note)


def bar_chart(title: str, names: Sequence[str], series: Sequence[Series], axis: Axis, note: str = "") -> Chart:
    """Horizontal bars, one group for each name; point i of a series is (i, value)."""
    legend, top = _legend(series, _TOP)
    group = len(series) * (_BAR + _BAR_GAP) + _GROUP_GAP
    bottom = top + len(names) * group + _GROUP_GAP
    height = bottom + _BOTTOM
    left = 16 + _CHARACTER * min(_LABELS_MAX, max((len(name) for name in names), default=0))
    values = [value for each in series for _, value in each.points if value is not None]
    across = _scale(axis, values, left, WIDTH - _RIGHT - 44, zero=True)
    parts = [*legend, *_vertical_grid(across, top, bottom), *_x_ticks(across, bottom)]
    parts.append(_text(axis.label, (left + WIDTH - _RIGHT - 44) / 2, height - 6, "middle"))
    for i, name in enumerate(names):
        shown = name if len(name) <= _LABELS_MAX else f"{name[: _LABELS_MAX - 1]}…"
        middle = top + _GROUP_GAP + i * group + (group - _GROUP_GAP) / 2
        parts.append(f"<g>{_tooltip(name)}{_text(shown, left - 8, middle + 4, 'end', 'name')}</g>")
    for number, each in enumerate(series):
        offset = top + _GROUP_GAP + number * (_BAR + _BAR_GAP)
        parts += _bars(each, _colour(each, number), names, across, offset, group)
    return Chart(title, _svg(title, parts, math.ceil(height)), note)


def share_chart(title: str, series: Sequence[Series], x: str, y: str, note: str = "") -> Chart:
    """Cumulative shares: how much (0 to 100%) the first share of things takes, on a logarithmic axis."""
    lowest = min((px for each in series for px, _ in each.points if px > 0), default=0.001)
    low = min(0.1, 10.0 ** math.floor(math.log10(lowest)))
    across = Axis(x, log=True, show=percent, low=low, high=1.0)
    return line_chart(title, series, across, Axis(y, show=percent, low=0, high=1), note)


def _colour(series: Series, number: int) -> int:
    return (number if series.colour is None else series.colour) % NUM_COLOURS


def _scale(axis: Axis, values: Iterable[Number], start: float, stop: float, *, zero: bool) -> _Scale:
    usable = [float(value) for value in values if _drawable(value, axis)]
    usable += [float(place) for place, _ in axis.ticks]
    if zero and not axis.log:
        usable.append(0.0)
    low, high = (min(usable), max(usable)) if usable else (1.0, 10.0)
    if zero and axis.log:
        low, high = _round_down(low), _round_up(high)
    low = low if axis.low is None else float(axis.low)
    high = high if axis.high is None else float(axis.high)
    if high <= low:
        low, high = (low / 2, low * 2) if axis.log else (low - (0.0 if zero else 0.5), low + 1)
    if axis.ticks:
        step = max(1, -(-len(axis.ticks) // TICKS_MAX))
        return _Scale(axis, low, high, start, stop, [(float(place), name) for place, name in axis.ticks[::step]])
    places = _log_ticks(low, high) if axis.log else _ticks(low, high)
    if axis.high is None and not axis.log and places[-1] < high:
        high = 2 * places[-1] - places[-2]
        places.append(high)
    return _Scale(axis, low, high, start, stop, [(place, axis.show(place)) for place in places])


def _drawable(value: Number, axis: Axis) -> bool:
    """Whether a value has a place on an axis; beyond 1e100 arithmetic on ticks would overflow."""
    return -1e100 < value < 1e100 and (value > 1e-100 or not axis.log)


def _round_down(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... at or below a positive number."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (5, 2, 1) if factor * power <= value * 1.000001)


def _round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... at or above a positive number."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * 0.999999)


def _ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers from low to high, about `wanted` of them."""
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, with 2 and 5 between them where there are few."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    step = max(1, -(-(last - first) // 8))
    places = [factor * 10.0**power for power in range(first, last + 1, step) for factor in factors]
    return [place for place in places if low * 0.999 <= place <= high * 1.001]


def _horizontal_grid(up: _Scale) -> list[str]:
    parts = []
    for value, name in up.ticks:
        y = up.place(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(_text(name, _LEFT - 8, y + 4, "end"))
    return parts


def _vertical_grid(across: _Scale, top: float, bottom: float) -> list[str]:
    return [f'<path class="grid" d="M{across.place(value):.1f} {top}V{bottom:.1f}"/>' for value, _ in across.ticks]


def _x_ticks(across: _Scale, bottom: float) -> list[str]:
    parts = [f'<path class="axis" d="M{across.start:.1f} {bottom:.1f}H{across.stop:.1f}"/>']
    for value, name in across.ticks:
        x = across.place(value)
        parts.append(f'<path class="axis" d="M{x:.1f} {bottom:.1f}v5"/>')
        parts.append(_text(name, x, bottom + 19, "middle"))
    return parts


def _axis_names(x: Axis, y: Axis, top: float, height: int) -> list[str]:
    middle = (top + height - _BOTTOM) / 2
    turned = f'transform="rotate(-90 13 {middle:.1f})"'
    return [
        _text(x.label, (_LEFT + WIDTH - _RIGHT) / 2, height - 6, "middle"),
        f'<text x="13" y="{middle:.1f}" text-anchor="middle" {turned}>{_escaped(y.label)}</text>',
    ]


def _line(series: Series, colour: int, across: _Scale, up: _Scale) -> list[str]:
    path, parts, pen = [], [], "M"
    for px, py in series.points:
        if py is None or not across.has(px) or not up.has(py):
            pen = "M"
            continue
        x, y = across.place(px), up.place(py)
        path.append(f"{pen}{x:.1f} {y:.1f}")
        pen = "L"
        label = next((name for place, name in across.axis.ticks if place == px), across.axis.show(px))
        said = f"{series.name}\n{across.axis.label}: {label}\n{up.axis.label}: {up.axis.show(py)}"
        dot = f'<circle class="dot f{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>' if series.dots else ""
        parts.append(f'<g class="point">{_tooltip(said)}{dot}<circle class="hit" cx="{x:.1f}" cy="{y:.1f}" r="9"/></g>')
    dashed = " dashed" if series.dashed else ""
    return [f'<path class="line s{colour}{dashed}" d="{"".join(path)}"/>', *parts] if path else []


def _bars(series: Series, colour: int, names: Sequence[str], across: _Scale, offset: float, group: int) -> list[str]:
    parts = []
    for i, value in series.points:
        if value is None or not across.has(value):
            continue
        y, end, said = offset + i * group, across.place(value), across.axis.show(value)
        shape = (
            f'x="{across.start:.1f}" y="{y:.1f}" width="{max(end - across.start, 0.8):.1f}" height="{_BAR}" rx="1.5"'
        )
        tip = _tooltip(f"{names[int(i)]}\n{series.name or across.axis.label}: {said}")
        parts.append(f'<rect class="bar f{colour}" {shape}>{tip}</rect>')
        parts.append(f'<text x="{end + 5:.1f}" y="{y + 8:.1f}" font-size="9.5">{_escaped(said)}</text>')
    return parts


def _legend(series: Sequence[Series], top: float) -> tuple[list[str], float]:
    """The names beside their colours, in as many lines as they take; and where the picture begins below them."""
    if len(series) < 2 and not any(each.name for each in series):
        return [], top
    parts, x, y = [], float(_LEFT), top
    for number, each in enumerate(series):
        width = 34 + _CHARACTER * len(each.name)
        if x + width > WIDTH - _RIGHT and x > _LEFT:
            x, y = float(_LEFT), y + _LEGEND_LINE
        dashed = " dashed" if each.dashed else ""
        parts.append(f'<path class="line s{_colour(each, number)}{dashed}" d="M{x:.1f} {y}h16"/>')
        parts.append(_text(each.name, x + 22, y + 4, "start", "name"))
        x += width
    return parts, y + _LEGEND_LINE


def _text(text: str, x: float, y: float, anchor: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_escaped(text)}</text>'


def _tooltip(text: str) -> str:
    return f"<title>{_escaped(text)}</title>"


def _escaped(text: str) -> str:
    return escape(visible(text))


def _svg(title: str, parts: Sequence[str], height: int) -> str:
    return (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{_escaped(title)}">{"".join(parts)}</svg>'
    )
