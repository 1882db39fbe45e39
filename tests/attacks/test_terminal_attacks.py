"""Escape sequences in what strangers name and say: a terminal and a page show them, and act on none."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys

import pytest
from rich.progress import Progress

from bagpipe.cli import launch as launch_command
from bagpipe.cli import output
from bagpipe.cli.output import PlainConsole, fail, print_pairs, print_rows, progress
from bagpipe.cluster.display import StatusLines
from bagpipe.data import generated, write
from bagpipe.data.manifest import MANIFEST, RangeEntry, load_manifest
from bagpipe.doctor import Check
from bagpipe.observe.charts import Axis, Series, bar_chart
from bagpipe.observe.page import Page
from bagpipe.visible import VisibleFormatter, visible
from harness.prepared import run as prepare
from harness.prepared import write_raw
from harness.process import BAGPIPE

ATTEMPTS = {
    "a colour": "\x1b[31mred\x1b[0m",
    "a cleared screen": "\x1b[2J\x1b[H",
    "a title": "\x1b]0;title\x07",
    "a link": "\x1b]8;;http://example.org\x1b\\click\x1b]8;;\x1b\\",
    "a clipboard": "\x1b]52;c;cm0gLXJmIH4=\x07",
    "a report that is typed": "\x1b[6n\x1b[c",
    "one byte that begins a sequence": "\x9b31m",
    "a bell": "ring\x07",
    "a line overwritten": "lost: 0.9\rloss: 0.1",
    "a text taken back": "no\x08\x08yes",
    "a text turned around": "exe\u202egpj.\u202c",
    "a text isolated": "\u2066abc\u2069",
    "a text that is not seen": "a\u200b\u2060\ufeffb\U000e0041",
    "a line that is none": "a\u2028b\u2029c\x0bd\x0ce\x85f",
    "half a character": "\udce9\ud800",
    "nothing": "a\x00b\x7f",
}
ACTIVE = {chr(number) for number in (*range(32), *range(127, 160))} - {"\n"}
ACTIVE |= set("\u061c\u200b\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067\u2068\u2069\ufeff")
ACTIVE |= {"\U000e0041", "\udce9"}
MARKUP = "[link=http://example.org]here[/link] [bold]loud[/] [/] :bomb:"


@pytest.fixture
def screen(monkeypatch):
    """A terminal in place of both streams; what it was sent, but for the styles that are our own."""
    text = io.StringIO()
    for name in ("console", "errors"):
        monkeypatch.setattr(output, name, PlainConsole(file=text, width=200, force_terminal=True, color_system=None))
    return text


def assert_seen_only(shown, attempt):
    assert not ACTIVE & set(shown), sorted(ACTIVE & set(shown))
    assert visible(attempt) in shown


@pytest.mark.parametrize("name", ATTEMPTS)
def test_the_text_is_there_to_be_read(name):
    assert not ACTIVE & set(visible(ATTEMPTS[name]))
    assert visible(f"one\n\ttwo {name}") == f"one\n\ttwo {name}"
    assert visible("one\n\ttwo", lines=False) == r"one\n\ttwo"
    assert visible("Müller 東京 🚴‍♀️ می‌خواهم") == "Müller 東京 🚴‍♀️ می‌خواهم"


@pytest.mark.parametrize("name", ATTEMPTS)
@pytest.mark.parametrize("width", [20, 200])
def test_tables_of_any_width_show_it(screen, name, width, monkeypatch):
    attempt = ATTEMPTS[name]
    monkeypatch.setattr(output, "console", PlainConsole(file=screen, width=width, color_system=None))
    print_rows(attempt, [{"feature": attempt, attempt: attempt, "mapping": {attempt: 1}}] * 3)
    print_pairs(attempt, {attempt: attempt, "path": os.fsencode(visible(attempt))})
    assert not ACTIVE & set(screen.getvalue())
    if width == 200:
        assert visible(attempt, lines=False) in screen.getvalue()


@pytest.mark.parametrize("name", ATTEMPTS)
def test_errors_show_it(screen, name):
    fail("DataError", f"table {ATTEMPTS[name]} is not there", as_json=False)
    assert_seen_only(screen.getvalue(), ATTEMPTS[name])


@pytest.mark.parametrize("name", ATTEMPTS)
def test_objects_for_programs_hold_it_in_ascii(capsys, name):
    fail("DataError", ATTEMPTS[name], as_json=True)
    assert not (ACTIVE - {"\x7f"}) & set(capsys.readouterr().out)


@pytest.mark.parametrize("name", ATTEMPTS)
def test_lines_of_roles_and_of_progress_show_it(screen, name):
    attempt = ATTEMPTS[name]
    plain = PlainConsole(file=screen, width=200)
    with StatusLines(plain) as show:
        show("trainer 0", attempt)
        show.tell(attempt)
    with progress(3, attempt) as report:  # not a terminal: a line each
        report.prepares(attempt)
        report(1, attempt)
        report.tell(attempt)
    sent = screen.getvalue()
    assert visible(attempt) in sent


@pytest.mark.parametrize("name", ATTEMPTS)
def test_bars_of_progress_show_it(name):
    text, attempt = io.StringIO(), ATTEMPTS[name]
    console = PlainConsole(file=text, width=200)
    bar = Progress(output.TITLE, console=console)
    bar.add_task(attempt, total=3)
    console.print(bar.get_renderable())
    assert not ACTIVE & set(text.getvalue())


def test_nothing_is_taken_for_markup_or_the_name_of_a_picture(screen):
    print_rows(MARKUP, [{"value": MARKUP}])
    print_pairs(MARKUP, {"value": MARKUP})
    fail("DataError", MARKUP, as_json=False)
    output.console.print(MARKUP)
    assert screen.getvalue().count(MARKUP) == 6


@pytest.mark.parametrize("name", ATTEMPTS)
def test_the_doctor_shows_it(screen, name, monkeypatch):
    from bagpipe.cli import doctor

    monkeypatch.setattr(doctor, "console", output.console)
    monkeypatch.setattr("bagpipe.doctor.examine", lambda: [Check("disk", True, ATTEMPTS[name], ATTEMPTS[name])])
    with pytest.raises(Exception, match="0"):
        doctor.doctor()
    assert_seen_only(screen.getvalue(), ATTEMPTS[name])


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("name", ATTEMPTS)
def test_what_a_launched_script_prints_does_nothing_to_a_terminal(name):
    attempt, screen, file = ATTEMPTS[name], Screen(), io.StringIO()
    launch_command._echo(screen, f"{attempt}\r\n")
    assert not ACTIVE & set(screen.getvalue())
    launch_command._echo(file, attempt)
    assert file.getvalue() == attempt


def test_a_bar_that_a_launched_script_draws_becomes_lines():
    screen = Screen()
    launch_command._echo(screen, "\r 10%\r 20%\r\ndone\n")
    assert screen.getvalue() == "\n 10%\n 20%\ndone\n"


@pytest.mark.parametrize("name", ATTEMPTS)
def test_logs_show_it_tracebacks_included(name):
    attempt = ATTEMPTS[name]
    try:
        raise ValueError(attempt)
    except ValueError:
        record = logging.LogRecord("bagpipe", logging.ERROR, "", 0, "a table %s", (attempt,), sys.exc_info())
    said = VisibleFormatter("%(message)s").format(record)
    assert_seen_only(said, attempt)
    assert "Traceback" in said


@pytest.mark.parametrize("name", ATTEMPTS)
def test_pages_show_it(name):
    attempt = f"<b>{ATTEMPTS[name]}</b>"
    page = Page(attempt, attempt)
    page.tiles({attempt: attempt})
    page.table(attempt, [attempt], [[attempt]])
    page.charts(bar_chart(attempt, [attempt], [Series(attempt, [(0, 1)])], Axis(attempt), attempt))
    html = page.html(attempt)
    assert not ACTIVE & set(html)
    assert "<b>" not in html.replace("<figcaption><b>", "")
    html.encode()


# Whole commands


def renamed(path, attempt):
    """A data set of strangers, whose tables and parts are called so."""
    write(generated("tiny", 200), path)
    manifest = load_manifest(path)
    tables = (manifest.tables[0].model_copy(update={"name": attempt}), *manifest.tables[1:])
    days = (RangeEntry(name=attempt, start=0, stop=100), RangeEntry(name="b", start=100, stop=200))
    changed = manifest.model_copy(update={"tables": tables, "days": days, "origin": attempt})
    (path / MANIFEST).write_text(changed.sealed().text())
    return path


def run(*words, **environment):
    return subprocess.run(
        [*BAGPIPE, *words], capture_output=True, timeout=100, check=False, env=os.environ | environment
    )


COMMANDS = {
    "show": ("data", "show"),
    "stats": ("data", "stats"),
    "plan": ("plan", "--tables", "--batch-size", "50"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_passes_on_what_a_data_set_of_strangers_is_called(command, tmp_path):
    attempt = "".join(each for name, each in ATTEMPTS.items() if name != "half a character")[:190]
    path = renamed(tmp_path / "da\x1b[2Jta\u202e", attempt)
    done = run(*COMMANDS[command], str(path), COLUMNS="600")
    for said in (done.stdout.decode(), done.stderr.decode()):
        assert not ACTIVE & set(said), sorted(ACTIVE & set(said))
    assert done.returncode == 0, done.stderr
    assert command == "show" or r"\x1b[31mred" in done.stdout.decode()


def test_values_of_strangers_are_shown_and_do_nothing(tmp_path):
    hostile = "red \x1b[31m\x07\x9b \u202e" + MARKUP
    (raw,) = write_raw(tmp_path / "raw", 300)
    raw.write_text(raw.read_text().replace(",city 1,", f",{hostile},"))
    prepare([raw], tmp_path / "data", numbering=("city=frequency",))
    for words in (("--count", "20"), ("--feature", "city", "--id", "2")):
        done = run("data", "show", str(tmp_path / "data"), *words, COLUMNS="300")
        assert (done.returncode, done.stderr) == (0, b"")
        assert_seen_only(done.stdout.decode(), hostile)


def test_an_error_that_names_a_file_of_strangers_passes_nothing_on(tmp_path):
    path = tmp_path / os.fsdecode(b"da\x1b]52;c;aGk=\x07ta\xe9\x9b")
    path.mkdir()
    done = run("data", "show", str(path))
    assert done.returncode == 1
    said = done.stderr.decode()
    assert not ACTIVE & set(said)
    assert r"\x1b]52;c;aGk=\x07ta\udce9\udc9b" in said


def test_the_traceback_of_a_defect_passes_nothing_on():
    program = (
        "import sys, bagpipe.cli as cli\n"
        "def broken(**_): raise ValueError('\\x1b]0;title\\x07')\n"
        "cli.app = broken\nsys.argv = ['bagpipe']\ncli.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert not ACTIVE & set(done.stderr.decode())
    assert r"ValueError: \x1b]0;title\x07" in done.stderr.decode()


def test_a_warning_of_a_command_passes_nothing_on():
    program = (
        "import sys, logging, bagpipe.cli as cli\n"
        "def warns(**_): logging.getLogger('bagpipe').warning('passing over %s', '\\x1b[2J\\x07')\n"
        "cli.app = warns\nsys.argv = ['bagpipe']\ncli.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert done.stderr.decode() == "passing over \\x1b[2J\\x07\n"
