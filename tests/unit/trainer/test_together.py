"""Several training loops in one process: one at a time as a seed says, or in threads."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from bagpipe.errors import DeadlineError, PipelineError, StoreError
from bagpipe.together import run_threads
from bagpipe.trainer.stages import Threads, Wait
from harness.explorer import FETCHES, INSERTS, LOOP, PLANS, SYNCS, WRITES_BACK, Together, stage_names


@pytest.fixture(autouse=True)
def no_thread_stays():
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("bagpipe-trainer")]


class Meeting:
    """Loops that count together: nobody begins a round before all have ended the one before; each has two stages."""

    def __init__(self, together, ranks, rounds):
        self.together, self.ranks, self.rounds = together, ranks, rounds
        self.arrived = [0] * ranks
        self.made = [0] * ranks
        self.taken = [0] * ranks
        self.running = 0
        self.seen = []

    def alone(self, what):
        """Whoever runs must be the only one."""
        assert self.running == 0
        self.running = 1
        self.seen.append(what)
        time.sleep(0)
        self.running = 0

    def stages(self, rank):
        def make():
            for number in range(self.rounds):
                yield Wait("room", lambda number=number: self.made[rank] - self.taken[rank] < 2)
                self.alone((rank, "make", number))
                self.made[rank] += 1

        def look():
            for number in range(self.rounds):
                yield Wait(f"round {number}", lambda number=number: min(self.arrived) > number)
                self.alone((rank, "look", number))

        return {"make": make(), "look": look()}

    def loop(self, rank):
        driver = self.together.driver(rank)
        driver.start(self.stages(rank))
        for number in range(self.rounds):
            driver.wait(Wait(f"item {number}", lambda number=number: self.made[rank] > number))
            self.taken[rank] += 1
            self.alone((rank, "train", number))
            driver.notify()
            self.arrived[rank] += 1
            driver.wait(Wait(f"everyone at {number}", lambda number=number: min(self.arrived) > number))
            assert max(self.arrived) <= number + 2
        driver.join()
        return rank * 10

    def run(self):
        return self.together.run([lambda rank=rank: self.loop(rank) for rank in range(self.ranks)])


@pytest.mark.parametrize("eagerness", [0.0, 0.5, 2.0, 50.0])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_loops_and_stages_run_to_their_end_one_at_a_time(ranks, eagerness):
    for seed in range(10):
        meeting = Meeting(Together(seed, eagerness), ranks, 5)
        assert meeting.run() == [rank * 10 for rank in range(ranks)]
        for rank in range(ranks):
            for what in ("make", "train", "look"):
                assert [item[2] for item in meeting.seen if item[:2] == (rank, what)] == list(range(5))
        assert {name for _, name in meeting.together.steps} == {LOOP, "make", "look"}


def test_equal_seeds_give_equal_steps_and_others_differ():
    def run(seed):
        meeting = Meeting(Together(seed), 3, 6)
        meeting.run()
        return meeting.together.steps, meeting.seen

    assert run(3) == run(3)
    assert len({str(run(seed)) for seed in range(8)}) == 8


def test_every_order_of_three_loops_comes_up():
    orders = set()
    for seed in range(200):
        together, order = Together(seed), []

        def loop(rank, together=together, order=order):
            together.driver(rank).notify()
            order.append(rank)
            together.driver(rank).notify()

        together.run([lambda rank=rank, loop=loop: loop(rank) for rank in range(3)])
        orders.add(tuple(order))
    assert len(orders) == 6


def watched(together):
    """A list that every pick is noted in, with all that were ready."""
    picks, choose = [], together._pick

    def pick():
        ready = [(loop.rank, LOOP) for loop in together._loops if not loop.ended and loop.wait.ready()]
        for rank, driver in together._drivers.items():
            ready += [(rank, name) for name, (_, wait) in driver.stages.items() if wait.ready()]
        picks.append((choose(), ready))
        return picks[-1][0]

    together._pick = pick
    return picks


@pytest.mark.parametrize(("eagerness", "first"), [(0.0, LOOP), (1e9, "stage")])
def test_eagerness_says_whether_loops_or_stages_go_first(eagerness, first):
    for seed in range(10):
        together = Together(seed, eagerness)
        picks = watched(together)
        Meeting(together, 2, 4).run()
        both = [chosen for chosen, ready in picks if len({name == LOOP for _, name in ready}) == 2]
        assert both
        assert {name == LOOP for _, name in both} == {first == LOOP}


@pytest.mark.parametrize("last", ["look", (1, "look"), (1, LOOP), (0, "make")])
def test_what_is_named_last_runs_only_when_nothing_else_can(last):
    for seed in range(20):
        together = Together(seed, last=frozenset({last}))
        picks = watched(together)
        Meeting(together, 2, 4).run()
        named = [ready for chosen, ready in picks if last in (chosen, chosen[1])]
        assert named
        assert all(last in (step, step[1]) for ready in named for step in ready)


def test_a_loop_may_wait_for_another_and_wake_it_through_any_driver():
    for seed in range(20):
        together, given = Together(seed), []

        def give(together=together, given=given):
            together.driver(0).notify()
            given.append("x")
            together.driver(1).notify()
            return "gave"

        def take(together=together, given=given):
            together.driver(1).wait(Wait("a gift", lambda: bool(given)))
            return given.pop()

        assert together.run([give, take]) == ["gave", "x"]


def test_an_error_of_one_loop_is_raised_as_it_is_and_ends_the_others():
    outcomes = set()
    for seed in range(60):
        together, seen = Together(seed), []
        error = StoreError("disk full")

        def fail(together=together, error=error):
            together.driver(0).notify()
            raise error from KeyError("inner")

        def other(rank, together=together, seen=seen):
            try:
                together.driver(rank).start({"idle": idle(seen, rank)})
                together.driver(rank).wait(Wait("godot", lambda: False))
            finally:
                together.driver(rank).notify()
                with pytest.raises(PipelineError, match=f"trainer {rank} is ended: StoreError: disk full"):
                    together.driver(rank).join()
                seen.append(rank)

        with pytest.raises(StoreError, match="disk full") as caught:
            together.run([fail, lambda other=other: other(1), lambda other=other: other(2)])
        assert caught.value is error
        assert isinstance(caught.value.__cause__, KeyError)
        begun = [item for item in seen if isinstance(item, int)]
        closed = {item for item in seen if isinstance(item, str)}
        assert begun == sorted(begun)
        assert closed <= {f"closed {rank}" for rank in begun}
        outcomes.add((tuple(begun), len(closed)))
    assert len(outcomes) > 3, "loops were ended before they began, in the middle, with stages and without"


def idle(seen, rank):
    try:
        yield Wait("nothing", lambda: True)
        yield Wait("godot", lambda: False)
    finally:
        seen.append(f"closed {rank}")


def failing(error):
    yield Wait("its start", lambda: True)
    raise error


def waiting_for(ready):
    yield Wait("what fails", ready)


@pytest.mark.parametrize(
    ("error", "expected", "named"),
    [
        (StoreError("disk full"), StoreError, "disk full"),
        (KeyError("x"), PipelineError, "trainer 1: bad failed: KeyErr"),
    ],
)
def test_an_error_of_a_stage_is_raised_by_the_waits_of_its_loop(error, expected, named):
    for seed in range(10):
        together, caught = Together(seed), []

        def loop(together=together, caught=caught):
            driver = together.driver(1)
            driver.start({"bad": failing(error), "other": idle([], 1)})
            with pytest.raises(expected, match=named) as info:
                driver.wait(Wait("godot", lambda: False))
            caught.append(info.value)
            driver.join()

        with pytest.raises(expected, match=named):
            together.run([lambda: None, loop])
        assert caught[0] is error or caught[0].__cause__ is error


def test_an_error_of_a_stage_whose_loop_is_over_is_not_lost():
    together, begun = Together(0, last=frozenset({"bad"})), []

    def leave():
        begun.append(True)
        together.driver(0).start({"bad": failing(StoreError("late"))})

    def stay():
        together.driver(1).wait(Wait("the end", lambda: bool(begun) and not together.driver(0).stages))

    with pytest.raises(StoreError, match="late"):
        together.run([leave, stay])


def test_a_condition_that_raises_does_so_where_it_is_waited_for():
    for seed in range(10):
        together, broken = Together(seed), []

        def look(broken=broken):
            if broken:
                raise StoreError("can't look")
            return False

        def loop(rank, together=together, look=look):
            together.driver(rank).start({"stage": waiting_for(look)} if rank == 0 else {})
            with pytest.raises(StoreError, match="can't look"):
                together.driver(rank).wait(Wait("godot", (lambda: False) if rank == 0 else look))
            return rank

        def breaks(together=together, broken=broken):
            together.driver(2).notify()
            broken.append(True)

        assert together.run([lambda loop=loop: loop(0), lambda loop=loop: loop(1), breaks]) == [0, 1, None]


def test_if_nothing_can_run_everyone_says_what_it_waits_for():
    together = Together(0)

    def loop(rank):
        driver = together.driver(rank)
        driver.start({"fetch": idle([], rank)} if rank else {})
        driver.wait(Wait(f"letter {rank}", lambda: False))

    with pytest.raises(DeadlineError) as caught:
        together.run([lambda: loop(0), lambda: loop(1), lambda: None])
    assert str(caught.value) == (
        "nothing can run: trainer 0 waits for letter 0; "
        "trainer 1 waits for letter 1 (its stages wait for: fetch: godot); trainer 2 has ended"
    )


def test_a_loop_that_hangs_on_something_else_is_named():
    together, event = Together(0, deadline_s=0.05), threading.Event()

    def hang():
        event.wait(60)
        together.driver(0).wait(Wait("anything", lambda: False))

    with pytest.raises(DeadlineError, match=r"trainer 0 has run for 0.05 s"):
        together.run([hang])
    event.set()
    for thread in threading.enumerate():
        if thread.name == "bagpipe-trainer-0":
            thread.join(60)


def test_waiting_outside_of_a_run_is_refused_unless_it_is_ready():
    driver = Together(0).driver(0)
    driver.notify()
    driver.wait(Wait("nothing", lambda: True))
    driver.join()
    with pytest.raises(DeadlineError, match="who waits for godot"):
        driver.wait(Wait("godot", lambda: False))


def test_stages_go_on_in_a_second_run():
    together = Together(0, eagerness=0)
    state = {"done": 0}

    def stage():
        for number in range(5):
            yield Wait("its turn", lambda: True)
            state["done"] = number + 1

    together.run([lambda: together.driver(0).start({"count": stage()})])
    before = state["done"]
    together.run([lambda: together.driver(0).join()])
    assert before < 5 == state["done"]


def test_a_run_after_one_that_failed_begins_afresh():
    together = Together(0, eagerness=1e9)

    def loop():
        together.driver(0).start({"bad": failing(StoreError("unseen"))})
        return 1 // 0

    with pytest.raises(ZeroDivisionError):
        together.run([loop])
    assert together.run([lambda: "a", lambda: "b"]) == ["a", "b"]
    assert Meeting(together, 2, 3).run() == [0, 10]


def test_an_interrupted_run_ends_its_loops():
    together, ended = Together(0), []

    def loop(rank):
        try:
            while True:
                together.driver(rank).wait(Wait("its turn", lambda: True))
        finally:
            ended.append(rank)

    def stage():
        for _ in range(20):
            yield Wait("its turn", lambda: True)
        raise KeyboardInterrupt

    together.driver(0).start({"interrupts": stage()})
    with pytest.raises(KeyboardInterrupt):
        together.run([lambda: loop(0), lambda: loop(1)])
    assert ended == [0, 1]


# Plain threads


def test_threads_give_their_results_by_rank():
    turn = threading.Barrier(3)
    assert run_threads([lambda rank=rank: (turn.wait(60), rank)[1] for rank in range(3)], 60) == [0, 1, 2]


def test_the_first_error_of_a_thread_aborts_the_others_and_is_raised():
    drivers = [Threads(60), Threads(60)]
    ended = []

    def loop(rank):
        drivers[rank].start({f"trainer-{rank}-idle": idle(ended, rank)})
        with pytest.raises(PipelineError, match="another trainer failed: ValueError: torn"):
            drivers[rank].wait(Wait("godot", lambda: False))
        ended.append(rank)
        drivers[rank].join()

    def fail():
        raise ValueError("torn")

    def abort(error):
        for driver in drivers:
            driver.abort(error)

    with pytest.raises(ValueError, match="torn"):
        run_threads([lambda: loop(0), lambda: loop(1), fail], 60, abort)
    assert {0, 1} <= set(ended)


def test_threads_that_do_not_end_after_a_failure_are_named_beside_it():
    event = threading.Event()

    def fail():
        raise ValueError("torn")

    with pytest.raises(DeadlineError, match=r"trainers 0 did not end within 0.05 s after ValueError: torn") as caught:
        run_threads([lambda: event.wait(60), fail], 0.05)
    assert isinstance(caught.value.__cause__, ValueError)
    event.set()
    for thread in threading.enumerate():
        if thread.name == "bagpipe-trainer-0":
            thread.join(60)


@pytest.mark.parametrize("run", [run_threads, lambda functions: Together(0).run(functions)], ids=["threads", "seeded"])
def test_loops_compute_with_the_bits_of_the_thread_that_runs_them(run):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(700, 900, generator=generator), torch.randn(900, 500, generator=generator)

    def compute():
        product = a @ b
        return torch.get_num_threads(), product, product.sum()

    torch.set_num_threads(2)
    expected = compute()
    thread = threading.Thread(target=torch.set_num_threads, args=(3,))  # what a new thread begins with from now on
    thread.start()
    thread.join(60)
    assert torch.get_num_threads() == 2
    for found in run([compute, compute]):
        assert found[0] == expected[0]
        assert torch.equal(found[1], expected[1])
        assert torch.equal(found[2], expected[2])


def test_every_role_of_a_stage_is_one_that_runs():
    """`last` with a name that no stage has would delay nothing, and no test would notice."""
    assert {PLANS, INSERTS, WRITES_BACK, *FETCHES} == set(stage_names())
    assert {PLANS, INSERTS, WRITES_BACK, *FETCHES, SYNCS} == set(stage_names(trainers=2))
