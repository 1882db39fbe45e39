"""Sessions that begin in the middle of a run: the same samples for every trainer as if all before had been planned."""

from __future__ import annotations

import threading

import pytest

from bagpipe.data.service import DataProcessorService, RemoteBatches
from bagpipe.errors import ConfigError, GenerationOverError, WireError
from bagpipe.oracle.service import OracleService
from bagpipe.trainer.pipeline import Counters
from harness.served import HASTY, RUN, Served, make_job


class From(Served):
    """An oracle, data processors and trainers that begin after `done` iterations."""

    def __init__(self, job, done, **options):
        super().__init__(job, 2, **options)
        self.done = done

    def start_processor(self, place):
        processor = DataProcessorService(
            self.listen(f"processor-{place}"), self.order, run=RUN, processor=place, processors=2, start=self.done
        )
        processor.start()
        self._stack.callback(processor.close)
        return processor

    def remote_batches(self):
        addresses, first = [processor.address for processor in self.processors], self.settings.first_needed(self.done)
        return RemoteBatches(self.network, addresses, self.order, run=RUN, patience=HASTY, start=first)

    def start_oracle(self, settings=None):
        options = {"run": RUN, "room": self.room, "done": self.done}
        oracle = OracleService(self.listen("oracle"), self.remote_batches(), self.settings, **options)
        oracle.start()
        self._stack.callback(oracle.close)
        return oracle


def samples(served, done=0):
    """What each trainer trains on, iteration by iteration."""
    given = []
    for rank in range(served.job.config.trainers):
        plans = served.plans(trainer=rank, done=done)
        taken = [
            (batch.batch.number, batch.batch.labels.tolist(), batch.batch.dense.tolist())
            for _, micro in plans.epoch(Counters())
            for batch in micro
        ]
        given.append(taken)
        plans.close()
    return given


@pytest.mark.parametrize("assign", ["contiguous", "round_robin", "aware"])
def test_a_session_gives_the_samples_of_the_whole_run_from_there_on(assign, tmp_path):
    job = make_job(tmp_path / "run", "trainers=2", f"assign={assign}")
    with Served(job, 2, room=30) as whole:
        expected = samples(whole)
    for done in (1, 12, 13, 25):
        with From(job, done, room=30) as session:
            assert samples(session, done) == [of_trainer[done:] for of_trainer in expected], done


def test_homes_of_rows_that_were_forgotten_in_between_need_no_batch_before(tmp_path, monkeypatch):
    monkeypatch.setattr("bagpipe.oracle.assign.PERIOD", 10)
    job = make_job(tmp_path / "run", "trainers=2", "assign=aware")
    with Served(job, 2, room=30) as whole, From(job, 17, room=30) as session:
        assert session.settings.first_needed(17) == 10
        assert samples(session, 17) == [of_trainer[17:] for of_trainer in samples(whole)]


def test_the_position_counts_from_the_beginning_of_the_run(tmp_path):
    job = make_job(tmp_path / "run")
    with From(job, 7) as session:
        plans = session.plans(done=7)
        reading = plans.epoch(Counters())
        for _ in range(3):
            next(reading)
        assert plans.position(3) == {"iterations": 10, "batches": 10, "loader": None}
        plans.resume({"iterations": 7, "batches": 7, "loader": None})
        with pytest.raises(ConfigError, match=r"3 batches into the data.*begins after 7"):
            plans.resume({"iterations": 3, "batches": 3, "loader": None})
        plans.close()


def test_a_trainer_that_begins_elsewhere_than_its_oracle_is_refused(tmp_path):
    with From(make_job(tmp_path / "run"), 7) as session:
        plans = session.plans(done=6)
        with pytest.raises(WireError, match=r"is for batch 7, and 6 was due"):
            next(plans.epoch(Counters()))
        plans.close()


def test_plans_that_are_abandoned_end_with_an_error_and_not_as_if_there_were_no_more(tmp_path):
    with Served(make_job(tmp_path / "run"), room=2) as served:
        plans = served.plans()
        reading = plans.epoch(Counters())
        next(reading)
        served.oracle.close()  # it will never answer again
        threading.Timer(0.2, plans.abandon, [GenerationOverError("generation 1 is over", 1)]).start()
        with pytest.raises(GenerationOverError, match="generation 1 is over"):
            list(reading)
        plans.close()


def test_who_waits_for_an_oracle_that_never_describes_its_plans_can_be_told_to_leave_off(tmp_path):
    with Served(make_job(tmp_path / "run")) as served:
        served.oracle.close()
        later = []

        def abandon_soon(plans):
            later.append(threading.Timer(0.2, plans.abandon, [GenerationOverError("generation 1 is over", 1)]))
            later[0].start()

        with pytest.raises(GenerationOverError, match="generation 1 is over"):
            served.plans(on_connect=abandon_soon)
        with pytest.raises(GenerationOverError, match="it was over before"):
            served.plans(on_connect=lambda plans: plans.abandon(GenerationOverError("it was over before", 1)))
        later[0].join()
