import threading

import pytest

from bagpipe.errors import DeadlineError, PipelineError, StoreError
from bagpipe.trainer.stages import Threads, Wait
from harness.explorer import Seeded


def counter(state, limit):
    for number in range(limit):
        yield Wait("its turn", lambda number=number: state["allowed"] > number)
        state["done"] = number + 1


def failing(error):
    yield Wait("the start", lambda: True)
    raise error


@pytest.mark.parametrize("driver", [Threads(5), Seeded(1), Seeded(2, eagerness=0)])
def test_stages_run_as_far_as_their_waits_allow(driver):
    state = {"allowed": 0, "done": 0}
    driver.start({"count": counter(state, 3)})
    for allowed in (1, 2, 3):
        state["allowed"] = allowed
        driver.notify()
        driver.wait(Wait("the count", lambda allowed=allowed: state["done"] >= allowed))
        assert state["done"] == allowed
    driver.join()


def test_a_typed_error_of_a_stage_surfaces_as_it_is():
    driver = Threads(5)
    driver.start({"bad": failing(StoreError("disk full"))})
    with pytest.raises(StoreError, match="disk full"):
        driver.wait(Wait("something", lambda: False))


def test_any_other_error_of_a_stage_surfaces_with_its_cause_and_the_name_of_the_stage():
    driver = Threads(5)
    driver.start({"prefetch": failing(KeyError("x")), "other": counter({"allowed": 0}, 1)})
    with pytest.raises(PipelineError, match="prefetch") as caught:
        driver.wait(Wait("something", lambda: False))
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(PipelineError):
        driver.join()
    assert not {"bagpipe-prefetch", "bagpipe-other"} & {thread.name for thread in threading.enumerate()}


def test_a_wait_ends_at_its_deadline_and_names_what_everyone_waits_for():
    driver = Threads(0.05)
    state = {"allowed": 0, "done": 0}
    driver.start({"count": counter(state, 1)})
    with pytest.raises(DeadlineError, match=r"waited .* for godot; .*count: its turn"):
        driver.wait(Wait("godot", lambda: False))
    state["allowed"] = 1
    driver.notify()
    driver.join()


def test_a_schedule_that_can_not_go_on_says_so():
    driver = Seeded(0)
    driver.start({"count": counter({"allowed": 0, "done": 0}, 1)})
    with pytest.raises(DeadlineError, match="nothing can run"):
        driver.wait(Wait("godot", lambda: False))


def test_equal_seeds_give_equal_schedules_and_others_differ():
    def run(seed):
        driver = Seeded(seed)
        state = {"allowed": 9, "done": 0}
        other = {"allowed": 9, "done": 0}
        driver.start({"a": counter(state, 9), "b": counter(other, 9)})
        driver.join()
        return driver.steps

    assert run(3) == run(3)
    assert len({tuple(run(seed)) for seed in range(8)}) > 1


def test_a_stage_named_last_runs_only_when_nothing_else_can():
    driver = Seeded(0, last=frozenset({"b"}))
    driver.start({"a": counter({"allowed": 9, "done": 0}, 9), "b": counter({"allowed": 9, "done": 0}, 9)})
    driver.join()
    assert driver.steps == ["a"] * 10 + ["b"] * 10
