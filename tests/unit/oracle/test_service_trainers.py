"""Several trainers on the plans of one oracle over a bad network: each has its part, and the bits are right (I1)."""

from __future__ import annotations

import threading
from itertools import islice

import pytest

from bagpipe.errors import ConfigError, ShardError, WireError
from bagpipe.oracle.outbox import Answer, Outbox
from bagpipe.oracle.service import PlanSettings
from bagpipe.results import joined_summary
from bagpipe.trainer.pipeline import Counters
from bagpipe.training import train_configured, train_reference
from bagpipe.types import Table
from bagpipe.wire.plan_messages import DividedBy, NextPlan, NoMorePlans
from harness.calls import ask_once
from harness.served import FAULTS, LONG, RUN, Served, make_job, quiet


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Two batches are read at once, so that few batches are many groups."""
    monkeypatch.setattr("bagpipe.data.dataset.GROUP_BATCHES", 2)


@pytest.mark.parametrize(
    "settings",
    [
        ["trainers=2", "cache=300"],
        ["trainers=3", "cache=250", "lookahead=4", "assign=round_robin", "data.samples=481"],
        ["trainers=2", "cache=250", "sync.design=partitioned", "sync.delayed=false"],
        ["trainers=3", "cache=220", "sync.design=replicated", "policy=lru"],
        ["trainers=3", "cache=250", "sync.design=lrpp", "lookahead=3"],
        ["trainers=2", "cache=300", "assign=aware"],
    ],
    ids=" ".join,
)
def test_trainers_over_a_bad_network_have_the_bits_of_the_reference(settings, tmp_path):
    job = make_job(tmp_path / "run", "epochs=1", *settings)
    expected, _ = train_reference(job, quiet)
    with Served(job, 2, seed=3, **FAULTS) as served:
        ended = served.train_all()
        status = served.oracle.status()
    state, others = ended[0][0], ended[1:]
    assert expected.differing(state) == []
    assert all(other is None for other, _ in others)
    assert status.ended == "all data is planned"
    assert status.plans_sent >= job.config.trainers * status.planned
    summary = joined_summary([summary for _, summary in ended])
    _, alone = train_configured(job, quiet)
    timeless = ("iterations", "samples", "auc", "hit_rate", "fetched_rows", "written_rows", "lookahead", "cache_rows")
    assert {key: summary[key] for key in timeless} == {key: alone[key] for key in timeless}
    assert 0 < summary["plan_bytes"] <= status.bytes_sent
    assert set(summary) - set(alone) == {"plan_bytes"}


def test_a_last_batch_with_fewer_samples_than_trainers_leaves_some_without(tmp_path):
    job = make_job(tmp_path / "run", "trainers=3", "cache=300", "data.samples=482", "epochs=1")
    assert job.train.num_samples % 36 == 2
    expected, _ = train_reference(job, quiet)
    with Served(job, **FAULTS) as served:
        assert expected.differing(served.train()) == []


def test_an_oracle_that_is_started_again_gives_every_trainer_the_same_part_again(tmp_path):
    job = make_job(tmp_path / "run", "trainers=2", "cache=300", "lookahead=3", *LONG)
    expected, _ = train_reference(job, quiet)
    with Served(job, 1, room=1, **FAULTS) as served:

        def restart(done, _):
            if done == 5:
                served.oracle.close()
                served.oracle = served.start_oracle()

        assert expected.differing(served.train(restart)) == []


def test_trainers_that_are_ahead_wait_for_the_slowest_and_nothing_piles_up(tmp_path):
    job = make_job(tmp_path / "run", "trainers=2", "lookahead=2")
    with Served(job, room=3) as served:
        fast, slow = (served.plans(trainer=rank, ahead=1) for rank in range(2))
        plans = fast.epoch(Counters())
        for _ in range(3):
            next(plans)
        assert served.oracle.status().ready == 3
        taken = threading.Thread(target=lambda: next(plans))
        taken.start()
        for plan, _ in islice(slow.epoch(Counters()), 2):
            assert plan.sync.rank == 1
        taken.join(30)
        assert not taken.is_alive()
        assert served.oracle.status().received >= 0
        fast.close()
        slow.close()


def test_what_is_wrong_with_the_data_reaches_every_trainer(tmp_path):
    job = make_job(tmp_path / "run", "trainers=2", "cache=300")

    def failing():
        yield from islice(job.batches(), 5)
        raise ShardError("shard 7 is damaged: generate it again")

    with Served(job, batches=failing()) as served:
        for rank in range(2):
            remote = served.plans(trainer=rank)
            with pytest.raises(ShardError, match="the oracle at oracle: shard 7 is damaged"):
                assert [plan.iteration for plan, _ in remote.epoch(Counters())] == [0, 1, 2, 3, 4]
            remote.close()


@pytest.mark.parametrize("other", ["trainers=3", "assign=round_robin", "sync.design=lrpp", "sync.delayed=false"])
def test_a_trainer_refuses_an_oracle_that_was_started_with_other_settings(other, tmp_path):
    job = make_job(tmp_path / "run", "trainers=2")
    settings = make_job(tmp_path / "other", "trainers=2", other).plan_settings()
    refused = pytest.raises(ConfigError, match=r"plans for . trainers with .* and this is trainer . of 2 trainers")
    with Served(job, settings=settings) as served, refused:
        served.train()


def test_one_trainer_refuses_the_plans_of_several_and_the_other_way_round(tmp_path):
    one, two = make_job(tmp_path / "one"), make_job(tmp_path / "two", "trainers=2")
    for job, other in ((one, two), (two, one)):
        with Served(job, settings=other.plan_settings()) as served:
            plans = served.plans()
            with pytest.raises(ConfigError, match="one trainer"):
                plans.check(job.model()[2], job.plan_settings().division)
            plans.close()


def test_who_is_none_of_the_trainers_is_refused(tmp_path):
    refused = pytest.raises(WireError, match="trainer 2 asks for plans: there are 2")
    with Served(make_job(tmp_path / "run", "trainers=2")) as served, refused:
        ask_once(served.oracle.handle, NextPlan(2, 0, -1), RUN)


def test_each_trainer_is_given_its_own_answer():
    outbox = Outbox(2, 1)
    outbox.put(0, [Answer(NoMorePlans(7)), Answer(NoMorePlans(8))])
    found = [
        ask_once(lambda peer, _, rank=rank: outbox.answer(peer, rank, 0, -1), NextPlan(rank, 0, -1), RUN).body
        for rank in (0, 1)
    ]
    assert found == [NoMorePlans(7), NoMorePlans(8)]


def test_the_division_is_described_and_one_trainer_has_none(tmp_path):
    settings = make_job(tmp_path / "run", "trainers=2", "assign=round_robin", "sync.delayed=false").plan_settings()
    assert settings.described([5]).division == DividedBy(2, "round_robin", "owned", False, True)
    assert make_job(tmp_path / "one").plan_settings().described([5]).division is None


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"trainers": 0}, "trainers is 0: give 1 to 64"),
        ({"trainers": 65}, "trainers is 65"),
        ({"assign": "best"}, "assign is 'best'"),
        ({"design": "mine"}, "sync.design is 'mine'"),
    ],
)
def test_a_division_that_can_not_be_is_refused(wrong, reason):
    with pytest.raises(ConfigError, match=reason):
        PlanSettings((Table("user"),), (4,), 100, **wrong)
