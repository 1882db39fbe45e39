"""A run that is stopped anywhere and started again gives the bytes of one that was never disturbed."""

import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from bagpipe.data import Shards
from bagpipe.data.prepare import job, progress
from bagpipe.errors import ConfigError, DataError, ShardError
from harness.prepared import contents, run, write_raw

WAYS = {
    "first": {},
    "frequency": {"numbering": ("frequency",)},
    "min-count": {"min_count": ("3",)},
    "mixed": {"numbering": ("frequency", "user=ids", "city=first"), "min_count": ("item=2",)},
    "hash": {"numbering": ("hash:50",)},
    "limit": {"limit": 777, "numbering": ("city=frequency",)},
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Many blocks, and counts that are put on record often."""
    monkeypatch.setattr(job, "BLOCK_BYTES", 3000)
    monkeypatch.setattr(job, "COUNT_SAMPLES", 200)


class Stop(BaseException):
    pass


def stop_after(monkeypatch, number):
    """Stop right after progress was saved that often."""
    saved = []
    save = progress.Working.save

    def stopping(self, moment):
        save(self, moment)
        saved.append(moment)
        if len(saved) == number:
            raise Stop

    monkeypatch.setattr(progress.Working, "save", stopping)
    return saved


@pytest.mark.parametrize("way", WAYS)
def test_stopping_after_any_shard_changes_nothing(tmp_path, monkeypatch, way):
    paths = write_raw(tmp_path / "raw", 1000, files=2, bad=(3, 400, 998))
    options = WAYS[way] | {"on_error": "quarantine", "test": "0.2"}
    with monkeypatch.context() as patch:
        saved = stop_after(patch, 0)
        run(paths, tmp_path / "whole", **options)
    assert len(saved) >= (6 if way == "limit" else 7)
    for number in range(1, len(saved) + 1):
        destination = tmp_path / f"stopped-{number}"
        with monkeypatch.context() as patch:
            stop_after(patch, number)
            with pytest.raises(Stop):
                run(paths, destination, **options)
        assert progress.has_progress(destination)
        again = run(paths, destination, **options)
        assert again.samples_before == sum(shard.samples for shard in saved[number - 1].shards)
        assert contents(destination) == contents(tmp_path / "whole")


def test_a_run_stopped_at_every_single_shard_changes_nothing(tmp_path, monkeypatch):
    paths = write_raw(tmp_path / "raw", 1000, timed=True, bad=(3, 400, 998))
    options = {"numbering": ("item=frequency",), "on_error": "skip"}
    run(paths, tmp_path / "whole", **options)
    for _ in range(20):
        with monkeypatch.context() as patch:
            stop_after(patch, 1)
            try:
                run(paths, tmp_path / "data", **options)
            except Stop:
                continue
        break
    else:
        pytest.fail("never finished")
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")


@pytest.mark.parametrize("way", ["first", "mixed"])
@pytest.mark.parametrize("renamed", [False, True])
def test_a_sudden_end_at_any_write_changes_nothing(tmp_path, monkeypatch, way, renamed):
    """As by kill -9: nothing is tidied up. Before and after each file gets its name."""
    paths = write_raw(tmp_path / "raw", 700, bad=(3,))
    options = WAYS[way] | {"on_error": "quarantine"}
    renames = []
    rename = Path.rename

    def dying(at):
        def rename_or_die(path, target):
            renames.append(target)
            if len(renames) == at and not renamed:
                raise Stop
            moved = rename(path, target)
            if len(renames) == at and renamed:
                raise Stop
            return moved

        return rename_or_die

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dying(0))
        run(paths, tmp_path / "whole", **options)
    for at in range(1, len(renames) + 1):
        destination = tmp_path / f"dead-{at}"
        renames.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", dying(at))
            patch.setattr("bagpipe.data.writer.ShardWriter._remove", lambda self: None)
            patch.setattr(job.Job, "_leave", lambda self: (self.working.close(), self.rejected.close(keep=True)))
            with pytest.raises(Stop):
                run(paths, destination, **options)
        run(paths, destination, **options)
        assert contents(destination) == contents(tmp_path / "whole")


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from harness.prepared import run
from bagpipe.data.prepare import progress
save, saved = progress.Working.save, []

def save_and_die(self, moment):
    save(self, moment)
    saved.append(moment)
    if len(saved) == 3:
        os.kill(os.getpid(), signal.SIGKILL)

progress.Working.save = save_and_die
run([Path(sys.argv[2])], Path(sys.argv[3]))
"""


def test_a_killed_process_leaves_what_the_next_one_needs(tmp_path):
    paths = write_raw(tmp_path / "raw", 1000)
    tests = str(Path(__file__).parents[3])
    ended = subprocess.run([sys.executable, "-c", KILLED, tests, str(paths[0]), str(tmp_path / "data")], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert run(paths, tmp_path / "data").samples_before == 450
    run(paths, tmp_path / "whole")
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    paths = write_raw(tmp_path / "raw", 1000, files=2)
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Stop):
            run(paths, tmp_path / "data")
    return paths


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"shard_samples": 100}, "shard-samples 150, now it is 100"),
        ({"limit": 500}, "limit None, now it is 500"),
        ({"numbering": ("city=ids",)}, "numbering of city first min-count 1, now it is ids min-count 1"),
        ({"min_count": ("4",)}, "numbering of city first min-count 1, now it is first min-count 4"),
    ],
)
def test_other_settings_are_refused_and_the_progress_stays(tmp_path, stopped, change, named):
    with pytest.raises(ConfigError, match=f"data was begun with {named}: give the same, or remove .*data"):
        run(stopped, tmp_path / "data", **change)
    assert run(stopped, tmp_path / "data").samples_before == 300


def test_threads_memory_and_the_split_may_change(tmp_path, stopped):
    run(stopped, tmp_path / "data", threads=1, memory="32GB", validation="0.1", test="day_1.csv")
    run(stopped, tmp_path / "whole", validation="0.1", test="day_1.csv")
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")
    assert Shards(tmp_path / "data").part_names == ("train", "validation", "test")


def test_a_changed_file_is_refused(tmp_path, stopped):
    text = stopped[1].read_text()
    stopped[1].write_text(text.replace("city 1", "city 9"))
    with pytest.raises(
        DataError, match=r"data was begun with another .*day_1\.csv \(it had another time.*remove .*data"
    ):
        run(stopped, tmp_path / "data")
    with stopped[1].open("a") as file:
        file.write("1,2.0,3,4,x,,i1\n")
    with pytest.raises(DataError, match=r"it had [\d,]+ bytes, now [\d,]+"):
        run(stopped, tmp_path / "data")


def test_other_files_are_refused(tmp_path, stopped):
    with pytest.raises(ConfigError, match=r"begun with 2 files, now there are 1, .* is .*day_1\.csv: give the same"):
        run(stopped[:1], tmp_path / "data")


def test_a_damaged_shard_is_found_before_the_run_goes_on(tmp_path, stopped):
    shard = tmp_path / "data" / "shard-00000.bin"
    data = bytearray(shard.read_bytes())
    data[-70] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ShardError, match=r"shard-00000\.bin is corrupt"):
        run(stopped, tmp_path / "data")


def test_a_damaged_progress_file_is_refused(tmp_path, stopped):
    (tmp_path / "data" / "working" / "progress.json").write_text("{}")
    with pytest.raises(ShardError, match=r"progress\.json is not the progress .*remove .*data"):
        run(stopped, tmp_path / "data")


def test_two_processes_do_not_prepare_the_same_data_set(tmp_path, stopped):
    other = progress.Working(tmp_path / "data")
    other.open()
    with pytest.raises(ShardError, match="is being prepared by another process"):
        run(stopped, tmp_path / "data")
    other.close()
    run(stopped, tmp_path / "data")


def test_on_error_can_be_loosened_but_lines_set_aside_stay_where_they_are(tmp_path, monkeypatch):
    paths = write_raw(tmp_path / "raw", 1000, bad=(600, 900))
    with pytest.raises(DataError, match="line 602"):
        run(paths, tmp_path / "data")
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(Stop):
            run(paths, tmp_path / "data", on_error="skip")
    with pytest.raises(ConfigError, match="begun with on-error skip, which has put 1 lines aside"):
        run(paths, tmp_path / "data", on_error="quarantine")
    run(paths, tmp_path / "data", on_error="skip")
    run(paths, tmp_path / "whole", on_error="skip")
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")


def test_an_error_before_the_first_shard_leaves_nothing(tmp_path):
    paths = write_raw(tmp_path / "raw", 1000, bad=(100,))
    with pytest.raises(DataError):
        run(paths, tmp_path / "data")
    assert not (tmp_path / "data").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError):
        run(paths, tmp_path / "empty", numbering=("frequency",))
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_finished_data_set_is_not_written_over(tmp_path):
    paths = write_raw(tmp_path / "raw", 300)
    run(paths, tmp_path / "data")
    before = contents(tmp_path / "data")
    (other,) = write_raw(tmp_path / "other", 300, seed=1)
    with pytest.raises(ConfigError, match=r"data holds a finished data set that was made with 1 files, .*day_0\.csv"):
        run([other], tmp_path / "data", schema=tmp_path / "raw" / "schema.toml")
    (tmp_path / "data" / "prepared.json").unlink()
    with pytest.raises(ShardError, match=r"data holds a finished data set, and no prepared\.json there says"):
        run(paths, tmp_path / "data")
    del before["prepared.json"]
    assert contents(tmp_path / "data") == before


@pytest.mark.parametrize("left", [(), ("lock",), ("lock", "progress.json", "words"), ("words",), None])
def test_the_same_command_again_reports_the_finished_data_set_and_tidies_up(tmp_path, left):
    paths = write_raw(tmp_path / "raw", 300, bad=(7,))
    first = run(paths, tmp_path / "data", on_error="skip", test="0.1")
    before = contents(tmp_path / "data")
    if left is not None:
        (tmp_path / "data" / "working").mkdir()
        for name in left:
            (tmp_path / "data" / "working" / name).touch()
    again = run(paths, tmp_path / "data", on_error="skip", test="0.1", threads=1)
    assert (again.manifest, again.rejected, again.samples_before) == (first.manifest, first.rejected, 299)
    assert contents(tmp_path / "data") == before
    assert not (tmp_path / "data" / "working").exists()


@pytest.mark.parametrize("stopped_at_the_end", [False, True])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"limit": 100}, "limit None, now it is 100"),
        ({"test": "0.2"}, "test 0.1, now it is 0.2"),
        ({"validation": "0.2"}, "validation None, now it is 0.2"),
        ({"min_count": ("4",)}, "numbering of city first min-count 1, now it is first min-count 4"),
        ({"on_error": "quarantine"}, "on-error skip, which has put 1 lines aside, now it is quarantine"),
    ],
)
def test_another_command_never_gets_the_finished_data_set(tmp_path, change, named, stopped_at_the_end):
    paths = write_raw(tmp_path / "raw", 300, bad=(7,))
    options = {"on_error": "skip", "test": "0.1"}
    run(paths, tmp_path / "data", **options)
    if stopped_at_the_end:
        (tmp_path / "data" / "working").mkdir()
        (tmp_path / "data" / "working" / "lock").touch()
    before = contents(tmp_path / "data")
    with pytest.raises(ConfigError, match=f"finished data set that was made with {named}: choose another"):
        run(paths, tmp_path / "data", **options | change)
    paths[0].write_text(paths[0].read_text() + "1,2.0,3,4,x,,i1\n")
    with pytest.raises(
        DataError, match=r"finished data set that was made with another .*day_0\.csv \(it had [\d,]+ bytes"
    ):
        run(paths, tmp_path / "data", **options)
    assert contents(tmp_path / "data") == before


@pytest.mark.parametrize("bad", [(), (100,)])
def test_a_stop_at_any_moment_of_tidying_up_is_made_good_by_the_same_command(tmp_path, monkeypatch, bad):
    """With a bad line before the first shard nothing is finished, and all is removed."""
    paths = write_raw(tmp_path / "raw", 400, bad=bad)
    good = write_raw(tmp_path / "good", 400)
    whole = run(good, tmp_path / "whole").manifest
    removed = []

    def stopping(at, original):
        def stop_or_remove(*args, **options):
            removed.append(args)
            if len(removed) == at:
                raise Stop
            return original(*args, **options)

        return stop_or_remove

    remove = progress.Working.remove
    for at in range(1, 40):
        destination = tmp_path / f"stopped-{at}"
        removed.clear()

        def removing(self, *, at=at, **options):
            with monkeypatch.context() as patch:
                for owner, name in ((Path, "unlink"), (Path, "rmdir"), (progress.shutil, "rmtree")):
                    patch.setattr(owner, name, stopping(at, getattr(owner, name)))
                remove(self, **options)

        with monkeypatch.context() as patch:
            patch.setattr(progress.Working, "remove", removing)
            patch.setattr("bagpipe.data.writer.ShardWriter._remove", lambda self: None)
            with suppress(Stop, DataError):
                run(paths, destination)
        if len(removed) < at:
            break
        again = run(good if bad else paths, destination)
        assert again.samples_before == (0 if bad else 400)
        assert again.manifest == whole
        assert not (destination / "working").exists()
    assert 4 < at < 39


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("way", ["first", "mixed"])
def test_a_full_disk_names_the_file_and_keeps_the_progress(tmp_path, monkeypatch, way, share):
    paths = write_raw(tmp_path / "raw", 1000, bad=(3,))
    options = WAYS[way] | {"on_error": "quarantine"}
    syncs = []

    def counting(descriptor, fsync=os.fsync):
        syncs.append(descriptor)
        if len(syncs) == at:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    at = 0
    monkeypatch.setattr(os, "fsync", counting)
    run(paths, tmp_path / "whole", **options)
    at = int(len(syncs) * share)
    syncs.clear()
    with pytest.raises(ShardError, match=r"data/\S+ can't be written \(No space left on device\): free space"):
        run(paths, tmp_path / "data", **options)
    assert progress.has_progress(tmp_path / "data")
    run(paths, tmp_path / "data", **options)
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")


def test_a_limit_on_the_size_of_files_is_met_like_a_full_disk(tmp_path):
    paths = write_raw(tmp_path / "raw", 1000)
    run(paths, tmp_path / "whole", shard_samples=500)
    largest = max(path.stat().st_size for path in (tmp_path / "whole").glob("shard*"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 100, hard))
    try:
        with pytest.raises(ShardError, match=r"shard-0000\d\.bin can't be written \(File too large\)"):
            run(paths, tmp_path / "data", shard_samples=500)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
