"""A run that began with the state of another one, and loses roles before it has a checkpoint of its own (I2)."""

from __future__ import annotations

import shutil
from dataclasses import fields

import pytest

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.failpoints import Fault
from bagpipe.training import train
from harness.cluster import Crew, run_crew
from harness.daily import day_job, state_of, trained_reference, write_days
from harness.faults import nothing_left
from harness.roles import Plot
from harness.served import Made, quiet


@pytest.fixture(scope="module")
def first_day(tmp_path_factory):
    """The data of both days, the reference after the first one, and its last checkpoint."""
    path = tmp_path_factory.mktemp("days")
    write_days(path, samples=120)
    train(day_job(path, path / "run", 1, checkpoint={"every": 100}), quiet)
    return path, trained_reference(day_job(path, path / "plain", 1)), path / "run" / "checkpoints"


def run(first_day, tmp_path, *faults, **settings):
    """The end of the second day in spite of these faults, what the supervisor saw, and the reference's bits."""
    data, before, checkpoints = first_day
    directory = tmp_path / "crew"
    shutil.copytree(checkpoints, directory / "checkpoints" / "first-day")  # where servers may read
    init_from = str(directory / "checkpoints" / "first-day")
    job = day_job(data, tmp_path / "run", 2, init_from=init_from, trainers=2, **settings)
    made = Made(**{field.name: getattr(job, field.name) for field in fields(job)})
    expected = state_of(trained_reference(job, before)).sha256()
    plot = Plot(*faults)
    with nothing_left():
        summary, crew, supervisor = run_crew(lambda: Crew(made, directory, servers=2, plot=plot))
    assert {fault for _, fault in plot.happened} == set(faults)
    assert summary["parameters_sha256"] == expected
    return supervisor.incidents, Checkpoints(crew.checkpoints)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("server.write.applied", at=3, role="server-1"),
        Fault("server.loaded", at=1, role="server-0"),
        Fault("trainer.step.updated", at=2, role="trainer-0"),
        Fault("resume.loaded", at=1, role="trainer-1"),
    ],
    ids=str,
)
def test_a_loss_before_the_first_checkpoint_goes_back_to_what_the_run_began_with(first_day, tmp_path, fault):
    incidents, _ = run(first_day, tmp_path, fault, recovery={"every": 100})
    assert [incident.done_after for incident in incidents] == [0]


def test_a_loss_after_it_goes_back_to_the_runs_own(first_day, tmp_path):
    fault = Fault("trainer.step.updated", at=4, role="trainer-1")
    settings = {"recovery": {"every": 2}, "checkpoint": {"every": 2, "keep": 9}}
    incidents, checkpoints = run(first_day, tmp_path, fault, **settings)
    assert [incident.done_after for incident in incidents] == [2]
    assert checkpoints.open(2).manifest.base is None
