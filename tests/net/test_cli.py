import json
import os
import resource
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from bagpipe.cli import main
from harness import seams

CONTRACT = {
    *("iterations", "samples", "samples_per_second", "loss", "auc", "hit_rate", "stall_fraction", "lookahead"),
    *("cache_rows", "parameters_sha256", "run_dir"),
}
TINY = [
    *("--set", "data.preset=tiny", "--set", "data.samples=3000", "--set", "batch_size=256", "--set", "model.dim=8"),
    *("--set", "cache=20000"),  # the default has millions of places, which take longer to prepare than to train with
]


@pytest.fixture
def bagpipe(monkeypatch, capsys, tmp_path):
    """The command, run in this process, in a directory of its own: imports cost seconds."""

    def run(*arguments):
        (tmp_path / "here").mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / "here")
        monkeypatch.setattr(sys, "argv", ["bagpipe", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=ended.value.code or 0, stdout=out, stderr=err)

    return run


def test_the_installed_command_trains_in_a_process_of_its_own(tmp_path):
    command = [sys.executable, "-c", "from bagpipe.cli import main; main()", "train", *TINY, "--json"]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False, env=os.environ
    )
    assert result.returncode == 0, result.stderr
    assert set(json.loads(result.stdout)) >= CONTRACT


def test_train_prints_the_contracts_keys_as_one_json_object_and_keeps_them(bagpipe, tmp_path):
    result = bagpipe("train", *TINY, "--json", "--run-dir", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert set(summary) >= CONTRACT
    assert (summary["iterations"], summary["samples"]) == (11, 2700)
    kept = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert kept["parameters_sha256"] == summary["parameters_sha256"]
    assert kept["config"]["model"]["dim"] == 8


def test_train_prints_a_table_for_people(bagpipe, tmp_path):
    result = bagpipe("train", *TINY, "--set", "iterations=2")
    assert result.returncode == 0, result.stderr
    assert "samples per second" in result.stdout
    assert len(list((tmp_path / "here" / "runs").iterdir())) == 1


def test_equal_settings_give_equal_parameters_and_another_seed_others(bagpipe, tmp_path):
    runs = [("a", 0), ("b", 0), ("c", 1)]
    digests = []
    for name, seed in runs:
        result = bagpipe("train", *TINY, "--set", f"seed={seed}", "--json", "--run-dir", tmp_path / name)
        digests.append(json.loads(result.stdout)["parameters_sha256"])
    assert digests[0] == digests[1] != digests[2]


def test_verify_compares_every_bit(bagpipe, tmp_path):
    result = bagpipe("verify", *TINY, "--set", "model.name=deepfm", "--set", "store=mapped", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert found["identical"] is True
    assert found["differing"] == 0
    assert found["tensors"] > 0
    assert found["rows"] > 0
    assert list((tmp_path / "here").iterdir()) == []


def test_generated_shards_train_to_the_same_bits_as_the_stream(bagpipe, tmp_path):
    made = bagpipe("data", "generate", "tiny", tmp_path / "shards", "--samples", 3000, "--json")
    assert json.loads(made.stdout) == {"samples": 3000, "shards": 1, "tables": 4}
    again = bagpipe("data", "generate", "tiny", tmp_path / "shards", "--samples", 10)
    assert again.returncode == 1
    settings = ["--set", f"data.path={tmp_path / 'shards'}", *TINY[4:]]
    results = [
        bagpipe("train", *settings, "--json", "--run-dir", tmp_path / "a"),
        bagpipe("train", *TINY, "--json", "--run-dir", tmp_path / "b"),
    ]
    digests = [json.loads(result.stdout)["parameters_sha256"] for result in results]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["train", "--set", "model.name=foo"], ["model.name", "wide_deep"]),
        (["train", "--set", "data.preset=foo"], ["foo", "tiny"]),
        (["train", "--set", "data.path=/nowhere"], ["/nowhere"]),
        (["train", "/nowhere.toml"], ["/nowhere.toml"]),
        (["train", *TINY, "--set", "cache=10"], ["cache", "at least"]),
        (["train", *TINY, "--set", "lookahead=0"], ["lookahead"]),
        (["train", *TINY, "--set", "data.samples=3"], ["3 samples"]),
        (["bench", "foo"], ["foo", "generator"]),
        (["bench"], ["generator"]),
        (["data", "generate", "foo", "/tmp/never-made"], ["foo", "tiny"]),
    ],
)
def test_bad_input_ends_in_one_readable_line_and_exit_code_1(bagpipe, arguments, named):
    result = bagpipe(*arguments)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    for part in named:
        assert part in result.stderr
    as_json = bagpipe(*arguments, "--json")
    assert as_json.returncode == 1
    assert json.loads(as_json.stdout).keys() == {"error", "message"}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["train", "--nope"], "--nope"),
        (["plan"], "data"),
        (["plan", "tiny", "--batch-size", "0"], "--batch-size"),
        (["plan", "tiny", "--batch-size", "many"], "--batch-size"),
        (["nope"], "nope"),
        (["data", "generate"], "preset"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_an_object_with_json(bagpipe, arguments, named):
    for_people = bagpipe(*arguments)
    assert (for_people.returncode, for_people.stdout) == (2, "")
    assert named in for_people.stderr
    for_programs = bagpipe(*arguments, "--json")
    assert (for_programs.returncode, for_programs.stderr) == (2, "")
    found = json.loads(for_programs.stdout)
    assert found["error"] == "UsageError"
    assert named in found["message"]


def test_ctrl_c_is_exit_code_130_and_an_object_with_json(bagpipe, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(seams.EXAMINE, interrupted)
    for_people = bagpipe("doctor")
    assert (for_people.returncode, for_people.stdout) == (130, "")
    assert "Interrupted" in for_people.stderr
    for_programs = bagpipe("doctor", "--json")
    assert (for_programs.returncode, for_programs.stderr) == (130, "")
    assert json.loads(for_programs.stdout)["error"] == "Interrupted"


def test_a_real_ctrl_c_ends_in_the_same_object(tmp_path):
    words = ["train", *TINY, "--json", "--set", "epochs=100000"]
    command = [sys.executable, "-c", "from bagpipe.cli import main; main()", *words]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while not (tmp_path / "runs").exists():  # the test's own deadline ends a process that never begins
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    assert json.loads(out)["error"] == "Interrupted"
    assert not (tmp_path / "runs").exists()


def test_defects_keep_their_traceback(bagpipe, monkeypatch):
    def broken():
        raise RuntimeError("a defect")

    monkeypatch.setattr(seams.EXAMINE, broken)
    for arguments in (["doctor"], ["doctor", "--json"]):
        with pytest.raises(RuntimeError, match="a defect"):
            bagpipe(*arguments)


def test_an_occupied_run_directory_is_never_written_into(bagpipe, tmp_path):
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "mine.txt").write_text("precious")
    result = bagpipe("train", *TINY, "--run-dir", occupied)
    assert result.returncode == 1
    assert "not empty" in result.stderr
    assert [path.name for path in occupied.iterdir()] == ["mine.txt"]


def test_a_failed_run_leaves_no_run_directory(bagpipe, tmp_path):
    result = bagpipe("train", *TINY, "--set", "cache=10")
    assert result.returncode == 1
    assert list((tmp_path / "here").iterdir()) == []


def test_doctor_reports_checks(bagpipe, tmp_path):
    result = bagpipe("doctor", "--json")
    found = json.loads(result.stdout)
    assert found["ok"] is (result.returncode == 0)
    assert {"python", "torch", "numba", "memory", "disk"} <= {check["name"] for check in found["checks"]}
    assert "torch" in bagpipe("doctor").stdout


def test_every_command_explains_itself(bagpipe):
    for command in (
        [],
        ["train"],
        ["verify"],
        ["bench"],
        ["doctor"],
        ["data"],
        ["data", "generate"],
        ["data", "presets"],
    ):
        result = bagpipe(*command, "--help")
        assert result.returncode == 0
        assert "Usage" in result.stdout


def test_benchmarks_and_presets_can_be_listed(bagpipe):
    names = [row["name"] for row in json.loads(bagpipe("bench", "--list", "--json").stdout)]
    assert {"generator", "reader"} <= set(names)
    presets = [row["preset"] for row in json.loads(bagpipe("data", "presets", "--json").stdout)]
    assert {"tiny", "criteo-kaggle-like", "criteo-terabyte-like"} <= set(presets)


def test_a_run_that_is_still_going_stays_when_somebody_tries_to_resume_it(bagpipe, tmp_path):
    run = tmp_path / "run"
    with seams.begun_run(run, TINY[1::2]):
        result = bagpipe("train", "--resume", run)
    assert result.returncode == 1
    assert "still going" in result.stderr
    assert (run / "config.json").exists()


def test_a_summary_that_could_not_be_written_whole_is_not_there_and_the_run_is_resumed(bagpipe, tmp_path, monkeypatch):
    """Its existence says that the run has ended."""
    whole = json.loads(bagpipe("train", *TINY, "--json").stdout)
    run, limit, opened = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE), os.open

    def open_on_a_full_disk(path, flags, *arguments, **options):
        descriptor = opened(path, flags, *arguments, **options)
        if "summary.json" in str(path) and flags & os.O_CREAT:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, limit[1]))
        return descriptor

    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", open_on_a_full_disk)
            result = bagpipe("train", *TINY, "--set", "checkpoint.every=4", "--run-dir", run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert result.returncode == 1
    assert str(run / "summary.json") in " ".join(result.stderr.split())
    assert [path.name for path in run.iterdir() if "summary" in path.name] == []
    result = bagpipe("train", "--resume", run, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["parameters_sha256"] == whole["parameters_sha256"]
    assert json.loads((run / "summary.json").read_text())["parameters_sha256"] == whole["parameters_sha256"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ((), None),
        (("policy=lru", "lookahead=4"), "policy=lookahead"),
        (("lookahead=4",), None),
        (("sync.design=owned",), None),
        (("trainers=1",), None),
    ],
)
@pytest.mark.parametrize("command", ["train", "verify"])
def test_lrpp_that_saves_nothing_is_said_on_standard_error(bagpipe, caplog, command, settings, named):
    chosen = ["trainers=2", "sync.design=lrpp", "iterations=2", "model.name=wide_deep", *settings]
    result = bagpipe(command, *TINY, *(word for each in chosen for word in ("--set", each)), "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)
    said = [record.getMessage() for record in caplog.records if "sync.design" in record.getMessage()]
    assert len(said) == (named is not None)
    assert named is None or (named in said[0] and "'lrpp'" in said[0] and "'replicated'" in said[0])
