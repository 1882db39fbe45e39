from pathlib import Path

import pytest

from bagpipe.config import AWARE_TRAINERS_MAX, DEFAULT_PRESET, DEFAULT_SAMPLES, Config, load_config
from bagpipe.errors import ConfigError
from bagpipe.kernels.assign import TRAINERS_MAX


def test_defaults_are_a_valid_run():
    config = load_config()
    assert config == Config()
    assert (config.model.name, config.batch_size, config.trainers) == ("dlrm", 2048, 1)


def test_a_file_and_overrides_are_laid_over_the_defaults(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('batch_size = 64\n[model]\nname = "deepfm"\ndim = 8\n')
    config = load_config(path, ["model.dim=16", "row_optimizer.name=adam", "data.preset = tiny", "seed=7"])
    assert (config.batch_size, config.model.name, config.model.dim) == (64, "deepfm", 16)
    assert (config.row_optimizer.name, config.data.preset, config.seed) == ("adam", "tiny", 7)


def test_how_trainers_share_their_work_is_read_from_file_and_overrides(tmp_path):
    defaults = Config()
    assert (defaults.assign, defaults.sync.design) == ("contiguous", "owned")
    assert defaults.sync.delayed
    path = tmp_path / "run.toml"
    path.write_text('trainers = 8\nassign = "aware"\n[sync]\ndesign = "lrpp"\ndelayed = false\n')
    config = load_config(path, ["assign=round_robin"])
    assert (config.trainers, config.assign, config.sync.design) == (8, "round_robin", "lrpp")
    assert not config.sync.delayed


def test_the_configuration_that_the_quickstart_writes_out_is_the_default(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text()
    path = tmp_path / "default.toml"
    path.write_text(text.split("```toml\n")[1].split("```")[0])
    written = load_config(path)
    assert written.model_dump(exclude={"data"}) == Config().model_dump(exclude={"data"})
    assert (written.data.preset, written.data.samples) == (DEFAULT_PRESET, DEFAULT_SAMPLES)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.name=foo", ["model.name", "'foo'", "wide_deep"]),
        ("modle.name=dlrm", ["modle", "no such setting", "model"]),
        ("row_optimizer.lrr=1", ["row_optimizer.lrr", "lr"]),
        ("row_optimizer.lr={name = 'cosine', lr = 1}", ["row_optimizer", "cosine", "iterations"]),
        ("row_optimizer.betas=3", ["row_optimizer.betas"]),
        ("batch_size=0", ["batch_size", "give at least 1", "0"]),
        ("recovery.every=0", ["recovery.every: give at least 1 (it is 0)"]),
        ("lookahead=0", ["lookahead: give at least 1 or 'auto' (it is 0)"]),
        ("checkpoint.keep=0", ["checkpoint.keep: give at least 1 (it is 0)"]),
        ("init_from=5", ["init_from: give a path (it is 5)"]),
        ("batch_size=many", ["batch_size", "many"]),
        ("row_optimizer.lr=-1", ["row_optimizer", "lr is -1"]),
        ("row_optimizer.lr=nan", ["row_optimizer", "lr is nan"]),
        ("data.held_out=1.5", ["data.held_out", "1.5"]),
        ("seed=-1", ["seed", "-1"]),
        ("lookahead=0", ["lookahead: ", "auto"]),
        ("assign=random", ["assign: ", "'contiguous', 'round_robin' or 'aware'", "'random'"]),
        ("trainers=0", ["trainers", "give at least 1", "0"]),
        ("sync.design=central", ["sync.design", "'owned', 'lrpp', 'replicated' or 'partitioned'", "'central'"]),
        ("sync.delayed=perhaps", ["sync.delayed", "perhaps"]),
        ("sync.deterministic=false", ["sync.deterministic: there is no such setting any more", "leave it out"]),
        ("sync.ordered=true", ["sync.ordered", "no such setting", "design, delayed, moving"]),
        ("sync=owned", ["sync: ", "'owned'"]),
        ("cache=nonsense", ["cache is 'nonsense'", "2GB"]),
        ("batch_size", ["a.b=c"]),
        ("=3", ["a.b=c"]),
    ],
)
def test_a_bad_setting_is_refused_with_its_name_value_and_what_is_allowed(override, named):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    for part in named:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["iterations=3", "epochs=2"], ["iterations", "epochs"]),
        (["data.path=/somewhere", "data.preset=tiny"], ["path", "preset"]),
        (["data.path=/somewhere", "data.samples=5"], ["samples"]),
        (["batch_size=2", "trainers=3"], ["batch_size", "trainers"]),
        (["assign=aware", "trainers=65"], ["'aware'", "at most 64 trainers, not 65", "round_robin"]),
        (["row_optimizer.name=sgd", "row_optimizer.eps=0.5"], ["eps", "sgd"]),
        (["batch_size=3", "batch_size.x=1"], ["batch_size"]),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(overrides, named):
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    for part in named:
        assert part in str(caught.value)


def test_as_many_trainers_are_allowed_as_can_be_placed():
    assert AWARE_TRAINERS_MAX == TRAINERS_MAX
    assert load_config(None, ["assign=aware", f"trainers={TRAINERS_MAX}"]).trainers == TRAINERS_MAX


def test_every_finding_is_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["model.name=foo", "batch_size=0", "nonsense=1"])
    assert len(str(caught.value).splitlines()) == 3


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load_config(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("batch_size = = 3")
    with pytest.raises(ConfigError, match=r"broken\.toml is not TOML"):
        load_config(broken)


def test_rows_may_have_a_directory_of_their_own():
    assert load_config(None, ["store=memory"]).rows_directory(Path("run")) is None
    assert load_config(None, ["store=mapped"]).rows_directory(Path("run")) == Path("run")
    assert load_config(None, ["store=/scratch/rows"]).rows_directory(Path("run")) == Path("/scratch/rows")
    with pytest.raises(ConfigError, match="store='tape': give 'memory', 'mapped', or the path of a directory"):
        load_config(None, ["store=tape"])


def test_memory_of_a_mapped_store_is_checked_when_it_is_read():
    assert load_config(None, ["store=mapped", "store_memory=2GB"]).store_memory == "2GB"
    with pytest.raises(ConfigError, match=r"store_memory \('2GB'\) goes with rows on disk"):
        load_config(None, ["store_memory=2GB"])
    with pytest.raises(ConfigError, match="store_memory is '3KB': give bytes such as"):
        load_config(None, ["store=mapped", "store_memory=3KB"])
