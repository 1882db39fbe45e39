"""The oracle and data processors as services: training over any network has the bits of training in one process."""

from __future__ import annotations

import threading
from itertools import islice

import pytest

from bagpipe.cluster.context import RoleWorld
from bagpipe.data.generator import Generated
from bagpipe.data.service import DataProcessorService, RemoteBatches
from bagpipe.errors import (
    BatchError,
    CapacityError,
    ConfigError,
    DeadlineError,
    PipelineError,
    ShardError,
    ValueRangeError,
    WireError,
)
from bagpipe.oracle.outbox import AHEAD_MAX, Answer, Outbox
from bagpipe.oracle.service import OracleService, PlanSettings
from bagpipe.store import MemoryStore
from bagpipe.trainer.pipeline import Counters
from bagpipe.trainer.remote_plans import RemotePlans
from bagpipe.training import train_configured, train_in, train_reference
from bagpipe.types import Table
from bagpipe.wire.frames import encode
from bagpipe.wire.listener import on_socket
from bagpipe.wire.messages import AskStats
from bagpipe.wire.plan_messages import DescribePlans, NextPlan, NoMorePlans, Planned, PlansDescribed
from bagpipe.wire.stream import SocketNetwork
from benchmarks.simulated import SimulatedNetwork
from harness.calls import Connection, ask_once, until
from harness.served import FAULTS, LONG, RUN, Served, make_job, quiet


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Two batches are read at once, so that few batches are many groups."""
    monkeypatch.setattr("bagpipe.data.dataset.GROUP_BATCHES", 2)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The ground truth, which no setting below changes."""
    state, _ = train_reference(make_job(tmp_path_factory.mktemp("run") / "reference"), quiet)
    return state


@pytest.fixture(scope="module")
def expected_long(tmp_path_factory):
    """The ground truth of more epochs."""
    state, _ = train_reference(make_job(tmp_path_factory.mktemp("run") / "reference", *LONG), quiet)
    return state


@pytest.mark.parametrize(
    ("processors", "settings"),
    [
        (1, ["cache=300"]),
        (2, ["cache=300", "lookahead=7"]),
        (3, ["cache=300", "check=true"]),
        (2, ["cache=200", "policy=lru"]),
        (3, ["cache=12KB", "policy=lru", "model.name=deepfm"]),
    ],
)
def test_training_over_a_bad_network_has_the_bits_of_the_reference_and_of_one_process(
    processors, settings, expected, tmp_path
):
    job = make_job(tmp_path / "run", *settings)
    if "model.name=deepfm" in settings:
        expected, _ = train_reference(job, quiet)
    with Served(job, processors, seed=processors, **FAULTS) as served:
        found = served.train()
        status = served.oracle.status()
        given = [processor.status().batches for processor in served.processors]
    assert expected.differing(found) == []
    assert expected.differing(train_configured(job, quiet, hold=True)[0]) == []
    assert (status.planned, status.ended) == (26, "all data is planned")
    assert status.plans_sent >= 26
    assert all(given)


def test_batches_of_a_local_iterator_are_planned_too(expected, tmp_path):
    job = make_job(tmp_path / "run", "cache=300")
    with Served(job, batches=job.batches()) as served:
        assert expected.differing(served.train()) == []


def test_a_processor_that_dies_is_replaced_at_its_address(expected_long, tmp_path):
    job = make_job(tmp_path / "run", "cache=300", "lookahead=2", *LONG)
    with Served(job, 2, room=1) as served:

        def kill(done, _):
            if done == 5:
                for place, processor in enumerate(served.processors):
                    processor.close()
                    served.processors[place] = served.start_processor(place)

        assert expected_long.differing(served.train(kill)) == []
        assert all(processor.status().batches for processor in served.processors)


def test_an_oracle_that_is_started_again_gives_the_same_plans(expected_long, tmp_path):
    job = make_job(tmp_path / "run", "cache=300", "lookahead=3", *LONG)
    with Served(job, 1, room=1, **FAULTS) as served:

        def restart(done, _):
            if done == 5:
                served.oracle.close()
                served.oracle = served.start_oracle()

        assert expected_long.differing(served.train(restart)) == []
        assert (served.oracle.status().planned, served.oracle.status().plans_sent > 0) == (78, True)


def test_an_oracle_that_is_started_again_with_other_settings_is_refused(tmp_path):
    job = make_job(tmp_path / "run", "cache=300", *LONG)
    other = make_job(tmp_path / "other", "cache=301", *LONG)
    with Served(job, 1, room=1) as served:

        def restart(done, _):
            if done == 3:
                served.oracle.close()
                served.oracle = served.start_oracle(other.plan_settings())

        with pytest.raises(WireError, match="started again with others"):
            served.train(restart)


def test_an_error_of_the_data_is_raised_after_all_batches_before_it_were_trained(tmp_path):
    job = make_job(tmp_path / "run", "cache=300")

    def failing():
        yield from islice(job.batches(), 5)
        raise ShardError("shard 7 is damaged: generate it again")

    done = []
    with (
        Served(job, batches=failing()) as served,
        pytest.raises(ShardError, match="the oracle at oracle: shard 7 is damaged"),
    ):
        served.train(lambda number, _: done.append(number))
    assert list(dict.fromkeys(done)) == [0, 1, 2, 3, 4, 5]


def test_an_error_in_a_processor_is_raised_where_its_batch_would_have_been(tmp_path, monkeypatch):
    job = make_job(tmp_path / "run", "cache=300", "data.shuffle=false")
    gather = Generated.gather

    def fail_later(dataset, samples):
        if samples.max() >= 6 * 36:
            raise ValueRangeError("sample 216 is bad: check the data")
        return gather(dataset, samples)

    plans = []
    monkeypatch.setattr(Generated, "gather", fail_later)
    with Served(job, 2, **FAULTS) as served:
        remote = served.plans()
        with pytest.raises(ValueRangeError, match="the data processor at processor-1: sample 216 is bad"):
            plans += (plan.iteration for plan, _ in remote.epoch(Counters()))
        remote.close()
    assert plans == list(range(6))


@pytest.mark.parametrize(
    ("settings", "batches", "error"),
    [
        (["cache=20"], None, (CapacityError, "a cache of 20 rows is too small")),
        ([], [], (BatchError, "the data is empty")),
    ],
)
def test_what_can_not_be_planned_is_refused_before_training(settings, batches, error, tmp_path):
    job = make_job(tmp_path / "run", *settings)
    with Served(job, batches=batches) as served, pytest.raises(error[0], match=error[1]):
        served.plans()


def test_a_failure_inside_the_oracle_is_told_without_its_details(tmp_path, caplog):
    job = make_job(tmp_path / "run")

    def failing():
        yield from islice(job.batches(), 2)
        raise KeyError("a secret")

    with Served(job, batches=failing()) as served:
        remote = served.plans()
        with pytest.raises(Exception, match="the oracle failed inside") as caught:
            list(remote.epoch(Counters()))
        remote.close()
    assert "secret" not in str(caught.value)
    assert "secret" in caplog.text


def test_the_same_iteration_asked_again_gets_the_same_bytes(tmp_path):
    job = make_job(tmp_path / "run")
    with Served(job) as served:
        first, *others = [ask_once(served.oracle.handle, NextPlan(0, 2, 1), RUN) for _ in range(3)]
    assert isinstance(first.body, Planned)
    assert first.body.iteration == 2
    assert all(list(map(bytes, encode(other))) == list(map(bytes, encode(first))) for other in others)


def test_no_more_plans_are_made_than_have_room_and_what_is_asked_for_always_has(tmp_path):
    job = make_job(tmp_path / "run", "lookahead=2")
    read = []
    batches = (read.append(batch.number) or batch for batch in job.batches())
    with Served(job, batches=batches, room=3) as served:
        one, other = (Connection(served.oracle.handle, run=RUN) for _ in range(2))
        one.ask(NextPlan(0, 0, -1))
        until(lambda: served.oracle.status().planned == 4)
        assert served.oracle.status().ready == 4
        assert len(read) <= 4 + 2 + 2  # plans, the window, the plan that waits for room with what was read for it
        for connection in (one, other):
            body = connection.ask(NextPlan(0, 5, 0))  # which may be made as soon as it is asked for
            assert isinstance(body, Planned)
            assert body.iteration == 5
        with pytest.raises(WireError, match="asks for plan 0, which it has received"):
            ask_once(served.oracle.handle, NextPlan(0, 0, -1), RUN)
        assert served.oracle.status().received == 0


def test_after_the_last_plan_everyone_who_asks_is_told_so(tmp_path):
    job = make_job(tmp_path / "run")
    with Served(job, room=40) as served:
        found = [ask_once(served.oracle.handle, NextPlan(0, number, 1), RUN).body for number in (26, 30)]
    assert found == [NoMorePlans(26), NoMorePlans(26)]


def test_plans_are_described(tmp_path):
    job = make_job(tmp_path / "run", "cache=300")
    with Served(job) as served:
        body = ask_once(served.oracle.handle, DescribePlans(0), RUN).body
    assert isinstance(body, PlansDescribed)
    assert [table.name for table in body.tables] == ["user", "item", "city", "device"]
    assert sum(body.capacity) <= 300
    assert (body.lookahead, body.policy, body.accumulate) == ("auto", "lookahead", 1)


@pytest.mark.parametrize(
    ("body", "run", "reason"),
    [
        (AskStats(), RUN, "an oracle was sent AskStats"),
        (NextPlan(0, 0, -1), bytes(16), "another run"),
        (NextPlan(1, 0, -1), RUN, "trainer 1 asks for plans: there are 1"),
        (NextPlan(0, AHEAD_MAX, -1), RUN, "asks for plan 64 and has received those up to -1"),
        (DescribePlans(3), RUN, "trainer 3"),
    ],
)
def test_an_oracle_refuses_what_it_can_not_answer(body, run, reason, tmp_path):
    with Served(make_job(tmp_path / "run")) as served, pytest.raises(WireError, match=reason):
        ask_once(served.oracle.handle, body, run)


def test_a_closed_outbox_answers_nobody_and_lets_its_maker_go():
    outbox, sent = Outbox(1, 1), []
    assert outbox.put(0, [Answer(NoMorePlans(0))])
    waiting = threading.Thread(target=lambda: sent.append(outbox.put(1, [Answer(NoMorePlans(0))])))
    waiting.start()
    outbox.close()
    waiting.join(30)
    assert sent == [False]
    with pytest.raises(ConnectionAbortedError, match="nothing is answered any more"):
        Outbox.answer(outbox, None, 0, 5, -1)


def test_an_oracle_that_does_not_answer_is_named_with_the_time_that_passed():
    network = SimulatedNetwork(0)
    with pytest.raises(DeadlineError, match=r"nowhere did not answer for 6\d.\d s, .*: see that it runs"):
        RemotePlans(network, "nowhere", run=RUN)


def test_settings_that_can_not_be_are_refused():
    with pytest.raises(ConfigError, match="1 tables with 2 widths"):
        PlanSettings((Table("user"),), (4, 4), 100)
    with pytest.raises(ConfigError, match="cache"):
        PlanSettings((Table("user"),), (4,), "much")
    with pytest.raises(ConfigError, match="room is 0"):
        OracleService(on_socket(), [], PlanSettings((Table("user"),), (4,), 100), run=RUN, room=0)


def test_a_service_that_could_not_listen_can_be_closed_with_what_it_was_given(tmp_path):
    job = make_job(tmp_path / "run")
    network = SimulatedNetwork()
    taken = network.listen("oracle", lambda *_: None)
    batches = RemoteBatches(network, ["nowhere"], job.data_order(), run=RUN)
    oracle = OracleService(
        lambda handler: network.listen(taken.address, handler), batches, job.plan_settings(), run=RUN
    )
    with pytest.raises(WireError, match="in use"):
        oracle.start()
    assert (oracle.status().address, oracle.status().planned) == ("", 0)
    oracle.close()
    with pytest.raises(PipelineError, match="reading was ended before batch 0"):
        next(iter(batches))


def test_services_answer_over_sockets_too_and_their_ports_are_free_afterwards(expected, tmp_path):
    job = make_job(tmp_path / "run", "cache=300")
    processor = DataProcessorService(on_socket(), job.data_order(), run=RUN)
    network = SocketNetwork()
    batches = RemoteBatches(network, [processor.start()], job.data_order(), run=RUN)
    oracle = OracleService(on_socket(), batches, job.plan_settings(), run=RUN)
    plans = RemotePlans(network, oracle.start(), run=RUN)
    found, summary = train_in(RoleWorld(job.config, plans, MemoryStore(job.model()[2])), job, quiet, hold=True)
    assert expected.differing(found) == []
    assert summary["plan_bytes"] == oracle.status().bytes_sent
    oracle.close()
    oracle.close()
    processor.close()
    processor.close()
    again = DataProcessorService(on_socket(processor.address), job.data_order(), run=RUN)
    assert again.start() == processor.address
    again.close()
