"""The roles of a run without Ray, in one process: what they make together is what one process makes alone (I1)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from bagpipe.checkpoint.directory import complete_points
from bagpipe.checkpoint.point import START
from bagpipe.cluster import context, oracle_role, trainer_role
from bagpipe.cluster.oracle_role import OracleRole
from bagpipe.cluster.processor_role import ProcessorRole
from bagpipe.cluster.server_role import ServerRole
from bagpipe.cluster.settings import Failure, Report, ScriptTask, Team, TrainerTask, Wiring
from bagpipe.cluster.trainer_role import Trained, TrainerRole
from bagpipe.config import parse_config
from bagpipe.errors import ConfigError
from bagpipe.job import Job, prepare
from bagpipe.results import joined_summary
from bagpipe.server.client import RemoteStore
from bagpipe.server.process import ServerOptions
from bagpipe.together import run_threads
from bagpipe.training import train
from bagpipe.wire.keys import new_keys
from bagpipe.world import World

HERE = "tcp://127.0.0.1:0"
SETTINGS = {
    "data": {"preset": "tiny", "samples": 2000, "shuffle": True},
    "model": {"name": "wide_deep", "dim": 4},
    "batch_size": 128,
    "iterations": 17,
    "cache": "1MB",
    "threads": 1,
    "checkpoint": {"final": False},
}
SCRIPT = """
import sys, torch, bagpipe
from bagpipe.data import Loader, generated
from bagpipe.models import build_model
data = generated("tiny", 400)
model = build_model("wide_deep", data.tables, data.num_dense, 4, torch.device("meta"), seed=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = bagpipe.prepare(model, optimizer, Loader(data, 100), features=data.tables)
for batch in loader:
    optimizer.zero_grad()
    model(batch.dense, batch.sparse).sum().backward()
    optimizer.step()
store = loader.loop.store
with open(sys.argv[1], "w") as file:
    file.write(f"{__name__} {type(store).__name__} {store.num_rows(0) > 0}")
store.close()
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def servers(tmp_path):
    """Two servers with keys; their addresses and what else a client needs."""
    wiring = Wiring(bytes(range(16)), *new_keys())
    roles = [ServerRole(f"server {number}") for number in range(2)]
    addresses = tuple(
        role.start(
            ServerOptions(
                address=HERE, server=number, servers=2, run=wiring.run, rollback=True, checkpoints=(str(tmp_path),)
            ),
            wiring,
        )
        for number, role in enumerate(roles)
    )
    yield SimpleNamespace(wiring=wiring, addresses=addresses, roles=roles)
    for role in roles:
        assert role.stop() is None


class Board:
    """Where a trainer leaves word, which hears of the end of its generation after so many."""

    def __init__(self, ends_after=None):
        self.words, self.ends_after = [], ends_after
        self.ask = SimpleNamespace(remote=self._leave)

    def _leave(self, method, role, report, generation):
        assert (method, generation) == ("leave", 0)
        self.words.append((role, report))
        return self.ends_after is None or len(self.words) < self.ends_after


@pytest.fixture(autouse=True)
def answers_at_once(monkeypatch):
    monkeypatch.setattr(trainer_role, "_answer", lambda call, _: call)


def test_roles_over_the_wire_end_with_the_parameters_of_one_process(servers, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_role, "REPORT_S", 0.02)
    config, wiring, board = parse_config(SETTINGS), servers.wiring, Board()
    job = prepare(config, tmp_path / "run")
    processors = [ProcessorRole(f"processor {number}") for number in range(2)]
    sources = [role.start(HERE, job.data_order(), wiring, number, 2) for number, role in enumerate(processors)]
    oracle = OracleRole("oracle")
    plans = oracle.start(HERE, sources, job.data_order(), job.plan_settings(), wiring)
    trainer = TrainerRole("trainer 0")
    assert trainer.prepare(config.model_dump(mode="json"), 1) is None
    trained = trainer.train(TrainerTask(wiring, servers.addresses, plans), board)
    assert isinstance(trained, Trained), trained

    alone = train(prepare(config, tmp_path / "alone"), lambda *_: None)
    assert trained.summary["parameters_sha256"] == alone["parameters_sha256"]
    assert trained.summary["iterations"] == 17
    assert alone.keys() - trained.summary.keys() == {"run_dir"}
    assert trained.ray_s >= 0
    assert any("of 17, loss" in report.line for _, report in board.words)
    assert processors[0].line().startswith("17 batches") or processors[1].line().startswith("17 batches")
    assert oracle.line().startswith("17 plans")
    assert sum(int(role.line().split()[0].replace(",", "")) for role in servers.roles) > 0
    for role in (trainer, oracle, *processors):
        assert role.stop() is None


def test_two_trainers_meet_and_end_with_the_parameters_of_threads_of_one_process(servers, tmp_path, monkeypatch):
    config, wiring = parse_config(SETTINGS | {"trainers": 2, "batch_size": 33}), servers.wiring
    job = prepare(config, tmp_path / "run")
    processor, oracle = ProcessorRole("processor 0"), OracleRole("oracle")
    source = processor.start(HERE, job.data_order(), wiring, 0, 1)
    plans = oracle.start(HERE, [source], job.data_order(), job.plan_settings(), wiring)
    trainers = [TrainerRole(f"trainer {rank}") for rank in range(2)]
    for trainer in trainers:
        assert trainer.prepare(config.model_dump(mode="json"), 1) is None
    hosts, meeting = ("127.0.0.1", "127.0.0.1"), trainers[0].meet("127.0.0.1")
    tasks = [TrainerTask(wiring, servers.addresses, plans, Team(rank, hosts, meeting)) for rank in range(2)]
    boards = [Board(), Board()]
    # Made before: trainers that are threads have one random generator, which the first one's evaluation uses too.
    made = [job.model() for _ in range(4)]
    monkeypatch.setattr(Job, "model", lambda _: made.pop())
    ended = run_threads([partial(trainers[rank].train, tasks[rank], boards[rank]) for rank in range(2)], 100)
    assert all(isinstance(trained, Trained) for trained in ended), ended
    assert not made

    monkeypatch.undo()
    alone = train(prepare(config, tmp_path / "alone"), lambda *_: None)
    summary = joined_summary([trained.summary for trained in ended])
    assert summary["parameters_sha256"] == alone["parameters_sha256"]
    assert "parameters_sha256" not in ended[1].summary
    assert summary.keys() - alone.keys() == {"plan_bytes", "checkpoints"}
    assert summary["plan_bytes"] > ended[0].summary["plan_bytes"]
    assert all(trainer.line() == "is done" for trainer in trainers)
    for role in (*trainers, oracle, processor):
        assert role.stop() is None


@pytest.mark.long
def test_a_script_finds_the_servers_of_its_launch_and_its_exit_code_is_told(servers, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["pytest"])
    monkeypatch.syspath_prepend(str(tmp_path))  # restores sys.path afterwards
    monkeypatch.chdir(tmp_path)
    script, said, alone = tmp_path / "script.py", tmp_path / "said", World.from_environment()
    script.write_text(SCRIPT)
    task = ScriptTask(
        servers.wiring, servers.addresses, str(script), (str(said), "3"), str(tmp_path), {"servers": 2}, threads=1
    )
    assert TrainerRole("trainer 0").run_script(task, Board()) == 3
    assert said.read_text() == "__main__ RemoteStore True"
    assert World.from_environment() is alone


def test_a_script_that_is_not_on_the_trainers_machine_is_named(servers):
    task = ScriptTask(servers.wiring, servers.addresses, "/nowhere/train.py", (), "/nowhere", {}, threads=1)
    failure = TrainerRole("trainer 0").run_script(task, Board())
    assert isinstance(failure, Failure)
    assert failure.kind == "ClusterError"
    assert "/nowhere/train.py" in failure.message


def test_a_server_that_can_not_start_says_why(servers):
    role = ServerRole("server 2")
    failure = role.start(ServerOptions(address=servers.addresses[0], run=servers.wiring.run), servers.wiring)
    assert isinstance(failure, Failure)
    assert failure.kind == "WireError"
    assert "in use" in failure.message


@pytest.mark.parametrize(
    ("address", "compressed"), [(HERE, False), ("tcp://[::1]:0", False), ("tcp://10.0.0.7:0", True)]
)
def test_plans_are_compressed_for_trainers_on_other_machines_only(address, compressed, monkeypatch):
    made, wiring = {}, Wiring(bytes(range(16)), *new_keys())

    def service(listen, batches, settings, **options):
        made.update(options)
        return SimpleNamespace(start=lambda: address, close=lambda: None)

    monkeypatch.setattr(oracle_role, "OracleService", service)
    monkeypatch.setattr(oracle_role, "RemoteBatches", lambda *_, **__: SimpleNamespace(close=lambda: None))
    role = OracleRole("oracle")
    assert role.start(address, [], None, SimpleNamespace(first_needed=lambda done: done), wiring) == address
    role.stop()
    assert made["compress"] == compressed


def test_a_role_keeps_word_of_another_until_it_is_asked():
    role = OracleRole("oracle")
    assert role.leave("trainer 0", Report("iteration 1", b"a", 1), 0)
    assert role.leave("trainer 0", Report("iteration 2", b"b", 2), 0)
    assert role.report() == {"trainer 0": Report("iteration 2", b"ab", 2), "oracle": Report("starts", b"")}
    assert role.report() == {"oracle": Report("starts", b"")}


def test_whoever_leaves_word_hears_that_its_generation_is_over_and_its_count_does_not_matter():
    role = OracleRole("oracle")
    assert role.leave("trainer 2", Report("iteration 8", b"", 8), 2)
    role.end_generation(2)
    assert not role.leave("trainer 0", Report("iteration 9", b"last words", 9), 2)
    role.end_generation(1)  # an old message
    assert role.leave("trainer 1", Report("iteration 5", b"", 5), 3)
    assert not role.leave("trainer 0", Report("iteration 9", b"!", 9), 2)
    found = role.report()
    assert found["trainer 0"] == Report("iteration 9", b"last words!", 0)
    assert found["trainer 1"].done == 5
    assert found["trainer 2"] == Report("iteration 8", b"", 0)


def test_what_nobody_foresaw_is_told_with_the_role_and_the_kind_of_error():
    failure = OracleRole("oracle").start(HERE, None, None, None, None)
    assert isinstance(failure, Failure)
    assert failure.kind == "ClusterError"
    assert failure.message.startswith("oracle failed with AttributeError")


def test_under_a_launch_rows_can_not_be_put_elsewhere(servers):
    launch = context.Launch(parse_config({}), servers.addresses, servers.wiring.run, servers.wiring.client)
    alone = World.from_environment()
    assert alone.trainers == 1
    with launch.entered():
        assert World.from_environment() is launch
        with launch.open_store([SimpleNamespace(width=3, initialise=None)]) as store:
            assert isinstance(store, RemoteStore)
        with pytest.raises(ConfigError, match="bagpipe launch"):
            World.from_environment().open_rows(SimpleNamespace(store="mapped", layouts=[]), None)
    assert World.from_environment() is alone


def test_a_trainer_of_several_that_does_not_know_where_to_meet_says_so():
    launch = context.Launch(parse_config({}), (), b"", None, 1, 2, ("127.0.0.1", "127.0.0.1"))
    with pytest.raises(ConfigError, match="trainer 1 of 2 knows no address"):
        launch.open_groups()


def test_a_trainer_whose_generation_is_over_leaves_off_and_can_train_again_from_the_checkpoint(
    servers, tmp_path, monkeypatch
):
    monkeypatch.setattr(trainer_role, "REPORT_S", 0.02)
    config = parse_config(SETTINGS | {"iterations": 60, "recovery": {"every": 4}})
    wiring, job, place = servers.wiring, prepare(config, tmp_path / "run"), tmp_path / "checkpoints"
    processor, oracle, trainer = ProcessorRole("processor 0"), OracleRole("oracle"), TrainerRole("trainer 0")
    assert trainer.prepare(config.model_dump(mode="json"), 1) is None

    def attempt(generation, point, board):
        done = point.done
        source = processor.start(HERE, job.data_order(), wiring, 0, 1, generation, done)
        plans = oracle.start(HERE, [source], job.data_order(), job.plan_settings(), wiring, generation, done)
        task = TrainerTask(
            wiring, servers.addresses, plans, generation=generation, resume=point, checkpoints=str(place)
        )
        return trainer.train(task, board)

    class UntilMarked(Board):
        """The generation is over once there is a mark, and some more."""

        def _leave(self, method, role, report, generation):
            self.words.append(generation)
            return generation > 0 or report.done < 14

    failure = attempt(0, START, UntilMarked())
    assert isinstance(failure, Failure), failure
    for role in servers.roles:
        assert role.abandon(1) is None
    told = [path for role in servers.roles for path in role.checkpoints()]
    point = max(complete_points(map(Path, told), place), key=lambda point: point.done)
    assert 4 <= point.done < 60
    assert point.done % 4 == 0
    for role in servers.roles:
        assert role.recover(1, point) is None
    trained = attempt(1, point, UntilMarked())
    assert isinstance(trained, Trained), trained
    alone = train(prepare(config, tmp_path / "alone"), lambda *_: None)
    assert trained.summary["parameters_sha256"] == alone["parameters_sha256"]
    assert trained.summary["iterations"] == 60
    for role in (trainer, oracle, processor):
        assert role.stop() is None
