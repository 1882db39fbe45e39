"""A report as one HTML file: sections of text, figures, tables and charts; no script, nothing from elsewhere.

Everything that is given as text is escaped, and the page forbids the browser to load or run anything: names in data are
written by strangers (I8). The markup is well-formed XML too, so that other programs can read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from bagpipe.errors import ConfigError
from bagpipe.observe import charts
from bagpipe.observe.charts import Chart
from bagpipe.visible import visible

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
STYLE = (
    ":root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1c2330;--muted:#5b6575;--line:#e3e7ed;"
    "--accent:#0b62a8}"
    "@media (prefers-color-scheme:dark){:root{--page:#12161d;--card:#1b212b;--ink:#e8ecf2;--muted:#9aa6b6;"
    "--line:#2c3441;--accent:#5aaeee}}"
    "*{box-sizing:border-box}"
    "body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,"
    "sans-serif}"
    "main{max-width:1240px;margin:0 auto;padding:32px 24px 56px}"
    "h1{font-size:26px;line-height:1.25;margin:0;overflow-wrap:anywhere}h2{font-size:19px;margin:40px 0 4px}"
    "p{margin:4px 0 0;color:var(--muted);max-width:80ch;overflow-wrap:anywhere}"
    ".tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(155px,1fr));gap:12px;margin:20px 0 0}"
    ".tile,figure,.wide{background:var(--card);border:1px solid var(--line);border-radius:10px}"
    ".tile{padding:12px 16px}.tile dt{color:var(--muted);font-size:13px}"
    ".tile dd{margin:0;font-size:22px;overflow-wrap:anywhere;font-weight:600;font-variant-numeric:tabular-nums}"
    ".charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:16px;"
    "margin:16px 0 0;align-items:start}"
    "figure{margin:0;padding:14px 16px 10px}figcaption{margin:0 0 10px}"
    "figcaption b{display:block;font-size:15px}figcaption span{color:var(--muted);font-size:13px}"
    ".wide{overflow-x:auto;margin:16px 0 0}"
    "table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}"
    "caption{text-align:left;padding:12px 16px 6px;font-weight:600;font-size:15px}"
    "th,td{padding:6px 12px;white-space:nowrap;text-align:right;border-top:1px solid var(--line)}"
    "thead th{color:var(--muted);font-weight:500;border-top:0;vertical-align:bottom}"
    "th.text,td.text{text-align:left}tbody tr:hover{background:var(--page)}"
    "footer{margin-top:40px;color:var(--muted);font-size:13px}"
    "@media print{body{background:#fff}figure,.tile,.wide{break-inside:avoid}}"
)

Cell = str | int | float | None


class Page:
    """Collects the parts of a report in order; `html` gives the file."""

    def __init__(self, title: str, summary: str = "") -> None:
        self.title = title
        self._parts = [f"<h1>{_escaped(title)}</h1>"]
        self.text(summary)

    def section(self, title: str, text: str = "") -> None:
        """Begin a part of the page."""
        self._parts.append(f"<h2>{_escaped(title)}</h2>")
        self.text(text)

    def text(self, text: str) -> None:
        """A paragraph; nothing if it is empty."""
        if text:
            self._parts.append(f"<p>{_escaped(text)}</p>")

    def tiles(self, values: Mapping[str, Cell]) -> None:
        """A few figures in large letters, by name."""
        tiles = "".join(
            f'<div class="tile"><dt>{_escaped(name)}</dt><dd>{_escaped(shown(value))}</dd></div>'
            for name, value in values.items()
        )
        self._parts.append(f'<dl class="tiles">{tiles}</dl>')

    def charts(self, *pictures: Chart) -> None:
        """Charts side by side where there is room."""
        self._parts.append(f'<div class="charts">{"".join(map(_figure, pictures))}</div>')

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Rows under their columns; numbers to the right, text to the left."""
        textual = [any(isinstance(row[i], str) for row in rows) and i == 0 for i in range(len(columns))]
        head = "".join(_cell("th", name, text) for name, text in zip(columns, textual, strict=True))
        body = "".join(
            f"<tr>{''.join(_cell('td', shown(value), text) for value, text in zip(row, textual, strict=True))}</tr>"
            for row in rows
        )
        self._parts.append(
            f'<div class="wide"><table><caption>{_escaped(title)}</caption><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )

    def html(self, footer: str = "") -> str:
        """The whole file."""
        end = f"<footer>{_escaped(footer)}</footer>" if footer else ""
        body = "\n".join(self._parts)
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
            f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}"/>'
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
            f"<title>{_escaped(self.title)}</title><style>{STYLE}{charts.STYLE}</style></head>\n"
            f"<body><main>{body}{end}</main></body></html>\n"
        )

    def save(self, path: Path, footer: str = "") -> None:
        """Write the file; one that is there is replaced."""
        try:
            path.write_text(self.html(footer), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} can't be written ({error.strerror}): choose another file") from error


def shown(value: Cell) -> str:
    """A value as people read it: whole numbers in full, others to four digits, an absent one as a dash."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return value


def _figure(chart: Chart) -> str:
    note = f"<span>{_escaped(chart.note)}</span>" if chart.note else ""
    return f"<figure><figcaption><b>{_escaped(chart.title)}</b>{note}</figcaption>{chart.svg}</figure>"


def _cell(kind: str, text: str, textual: bool) -> str:
    return f'<{kind} class="text">{_escaped(text)}</{kind}>' if textual else f"<{kind}>{_escaped(text)}</{kind}>"


def _escaped(text: str) -> str:
    return escape(visible(text))
