"""What a run leaves in its directory, and what it says while it goes on."""

import json
import math
import os
import subprocess
import sys

import pytest

from bagpipe.cli.output import progress
from bagpipe.config import load_config
from bagpipe.errors import ConfigError
from bagpipe.job import open_job, prepare
from bagpipe.results import METRICS_EVERY_S, Clock, MetricsLog
from bagpipe.trainer.pipeline import Counters
from bagpipe.training import train

TINY = [
    *("data.preset=tiny", "data.samples=3000", "batch_size=256", "model.dim=8", "cache=20000"),
    "model.name=wide_deep",
]
KEYS = {
    *("iteration", "samples", "seconds", "loss", "samples_per_second", "hit_rate", "fetched_rows", "stall_fraction"),
}


class Now:
    """A clock that a test moves."""

    s = 100.0

    def __call__(self):
        return self.s


@pytest.fixture
def job(tmp_path):
    return prepare(load_config(None, TINY), tmp_path / "run")


def lines_of(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def ticked(log, now, job, iterations, traffic=None, done=0):
    clock = Clock(done)
    for _ in range(iterations):
        now.s += 1.0
        clock.loss = 0.5
        clock.tick([0] * 256, lambda *_: None)
        log.tick(clock, traffic or Counters())
    return clock


def test_a_line_every_few_seconds_has_the_figures_since_the_one_before(job):
    now, traffic = Now(), Counters()
    log = MetricsLog(job.run_dir, job, 0, now)
    clock = Clock(0)
    for number in range(1, 9):
        now.s += METRICS_EVERY_S / 2
        traffic.unique_rows += 100
        traffic.hit_rows += 25 if number <= 4 else 75
        traffic.fetched_rows += 10
        traffic.stall_s += METRICS_EVERY_S / 10
        clock.loss = 1.0 / number
        clock.tick([0] * 256, lambda *_: None)
        log.tick(clock, traffic)
    lines = lines_of(job.run_dir)
    assert [line["iteration"] for line in lines] == [2, 4, 6, 8]
    assert all(set(line) == KEYS for line in lines)
    assert [line["samples"] for line in lines] == [512, 1024, 1536, 2048]
    assert [line["hit_rate"] for line in lines] == [0.25, 0.25, 0.75, 0.75]
    assert {line["fetched_rows"] for line in lines} == {20}
    assert {line["stall_fraction"] for line in lines} == {0.2}
    assert {line["samples_per_second"] for line in lines} == {round(512 / METRICS_EVERY_S, 1)}
    assert lines[0]["loss"] == 0.5


def test_the_last_iteration_has_a_line_once(job):
    now = Now()
    log = MetricsLog(job.run_dir, job, 0, now)
    clock = ticked(log, now, job, 3)
    log.tick(clock, Counters(), last=True)
    log.tick(clock, Counters(), last=True)
    assert [line["iteration"] for line in lines_of(job.run_dir)] == [3]


def test_what_is_no_number_is_null(job):
    now = Now()
    log = MetricsLog(job.run_dir, job, 0, now)
    clock = Clock(0)
    clock.tick([0], lambda *_: None)
    assert math.isnan(clock.loss)
    log.tick(clock, Counters(), last=True)
    (line,) = lines_of(job.run_dir)
    assert line["loss"] is None
    assert line["hit_rate"] is None


def test_a_run_that_goes_on_drops_the_lines_of_what_it_trains_again(job):
    path = job.run_dir / "metrics.jsonl"
    kept = [json.dumps({"iteration": number, "loss": 0.1}) + "\n" for number in (3, 6)]
    path.write_text("".join(kept) + json.dumps({"iteration": 9, "loss": 0.1}) + '\n{"iteration": 11, "lo')
    now = Now()
    log = MetricsLog(job.run_dir, job, 6, now)
    assert path.read_text() == "".join(kept)
    clock = ticked(log, now, job, 1, done=6)
    log.tick(clock, Counters(), last=True)
    assert [line["iteration"] for line in lines_of(job.run_dir)] == [3, 6, 7]


def test_a_file_that_can_not_be_written_does_not_end_the_run(job, caplog):
    for number in range(2):
        now = Now()
        log = MetricsLog(job.run_dir, job, 0, now)
        (job.run_dir / "metrics.jsonl").mkdir(exist_ok=True)
        clock = ticked(log, now, job, 12)
        log.tick(clock, Counters(), last=True)
        assert caplog.text.count("metrics.jsonl can't be written") == number + 1


def test_a_run_leaves_its_weights_and_a_file_of_figures(job):
    summary = train(job, lambda *_: None)
    assert summary["weights"] == str(job.run_dir / "checkpoints" / "00000011")
    assert sorted(path.name for path in job.run_dir.iterdir()) == [
        "checkpoints", "config.json", "metrics.jsonl", "summary.json",
    ]  # fmt: skip
    assert lines_of(job.run_dir)[-1]["iteration"] == summary["iterations"] == 11
    begun = open_job(load_config(None, [*TINY, f'init_from="{job.run_dir}"']), job.run_dir.parent / "next")
    (job.run_dir.parent / "next").mkdir()
    assert train(begun, lambda *_: None)["auc_untrained"] == summary["auc"]


@pytest.mark.parametrize("trainers", [1, 2])
def test_without_a_final_checkpoint_there_is_none_and_the_result_is_the_same(tmp_path, trainers):
    digests = set()
    for final in ("true", "false"):
        settings = [*TINY, f"checkpoint.final={final}", f"trainers={trainers}"]
        job = prepare(load_config(None, settings), tmp_path / final)
        summary = train(job, lambda *_: None)
        assert ("weights" in summary) == (job.run_dir / "checkpoints").exists() == (final == "true")
        digests.add(summary["parameters_sha256"])
    assert len(digests) == 1


def test_a_checkpoint_of_the_end_alone_is_a_valid_period_of_a_script():
    import bagpipe

    assert bagpipe.Checkpointing("somewhere", every=None).every is None
    with pytest.raises(ConfigError, match="or None"):
        bagpipe.Checkpointing("somewhere", every=0)


def test_where_there_is_no_terminal_lines_are_plain(capsys):
    with progress(None, "training") as report:
        report.prepares("loading PyTorch")
        report.begins(1200)
        report(1, "loss 0.5")
        report(2, "loss 0.4")
        report(1200, "evaluating: 0 of 3 batches")
        report.tell("lookahead: all rows fetched")
    assert capsys.readouterr().err.splitlines() == [
        "training: loading PyTorch",
        "training: 1 of 1,200, loss 0.5",
        "training: 1,200 of 1,200, evaluating: 0 of 3 batches",
        "lookahead: all rows fetched",
    ]


PROGRAM = """
import sys
class Told:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.stderr.write("<torch>\\n")
sys.meta_path.insert(0, Told())
from bagpipe.cli import main
main()
"""


@pytest.mark.parametrize(
    ("command", "first"),
    [(["train"], "training: loading PyTorch"), (["verify"], "training twice: loading PyTorch"),
     (["compare", "--policies", "lru", "--repeat", "1"], "training: loading PyTorch")],
)  # fmt: skip
def test_the_first_word_comes_before_pytorch_is_loaded(tmp_path, command, first):
    settings = [part for setting in TINY for part in ("--set", setting)]
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, *command, *settings], cwd=tmp_path, capture_output=True, text=True,
        timeout=200, check=False, env=os.environ,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    told = found.stderr.splitlines()
    assert told.index(first) < told.index("<torch>")
    if command[0] == "compare":
        results = [line for line in told if line.startswith("lru: ")]
        assert len(results) == 1
        assert results[0].endswith("the reference's bits")
        assert told.index(results[0]) < len(told)
    if command[0] == "train":
        assert "weights for PyTorch:    bagpipe checkpoint export runs/" in found.stdout
