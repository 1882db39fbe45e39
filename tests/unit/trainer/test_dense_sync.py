"""Dense gradients of several trainers, in threads: the bits of the reference, and every way to get out of step."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bagpipe.errors import DeadlineError, ModelError, PipelineError
from bagpipe.reference import _mean_dense
from bagpipe.trainer.dense_sync import DenseSync
from bagpipe.trainer.stages import Threads
from harness.collectives import strict_groups
from harness.examples import examples
from harness.plain import threads_left

SHAPES = [(3, 2), (5,), (), (0,), (7, 1)]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = threading.enumerate()
    yield
    assert threads_left(before=before) == []


def run_ranks(size, body, deadline_s=20.0):
    """Run body(rank, group, driver) in a thread each; what each returned or raised."""
    drivers = [Threads(deadline_s) for _ in range(size)]
    groups = strict_groups(size, lambda: [driver.notify() for driver in drivers], deadline_s)
    results = [None] * size

    def run(rank):
        try:
            results[rank] = body(rank, groups[rank], drivers[rank])
        except Exception as error:
            groups[rank].abort(error)
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


def all_fine(results):
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def make_parameters(shapes=SHAPES, seed=0):
    drawn = torch.Generator().manual_seed(seed)
    return [(f"p{number}", nn.Parameter(torch.randn(shape, generator=drawn))) for number, shape in enumerate(shapes)]


def backward(parameters, grads):
    """A backward pass that gives each parameter the gradient it is told, or none."""
    terms = [(p * grad).sum() for (_, p), grad in zip(parameters, grads, strict=True) if grad is not None]
    if terms:
        torch.stack(terms).sum().backward()
    return bool(terms)


def draw_grads(drawn, shapes, missing=0.0):
    grads = []
    for shape in shapes:
        values = drawn.standard_normal(shape) * 10.0 ** drawn.integers(-3, 4, shape)
        grads.append(None if drawn.random() < missing else torch.tensor(values, dtype=torch.float32))
    return grads


def assert_same_bits(found, expected):
    assert (found is None) == (expected is None), (found, expected)
    if found is not None:
        assert found.shape == expected.shape
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), (found, expected)


def expected_mean(grads, samples):
    """As the reference has it: ranks without samples are left out."""
    rest = [(each, np.float32(count)) for each, count in zip(grads, samples, strict=True) if count]
    if not rest:
        return None
    given, weights = zip(*rest, strict=True)
    return _mean_dense(given, weights, np.float32(sum(samples)) if len(samples) > 1 else None)


@examples(60)
@given(
    st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, 5), min_size=size, max_size=size)),
    st.sampled_from([1, 30, 10**9]),
    st.sampled_from([0.0, 0.4]),
    st.integers(0, 2**20),
)
def test_gradients_are_the_bits_of_the_reference(samples, bucket_bytes, missing, seed):
    drawn = np.random.default_rng(seed)
    size, total = len(samples), sum(samples)
    steps = [[draw_grads(drawn, SHAPES, missing) for _ in range(size)] for _ in range(2)]

    def body(rank, group, driver):
        parameters = make_parameters()
        sync = DenseSync(parameters, group, driver, bucket_bytes=bucket_bytes)
        found = []
        for step in steps:
            for _, parameter in parameters:
                parameter.grad = None
            sync.begin(samples[rank], total)
            grads = step[rank]
            if not samples[rank] and size > 1:
                grads = [None if grad is None else grad * torch.nan for grad in grads]
            if not backward(parameters, grads):
                sync.skip()
            found.append([None if p.grad is None else p.grad.clone() for _, p in parameters])
        sync.close()
        driver.join()
        return found

    for found in all_fine(run_ranks(size, body)):
        for step, grads in zip(steps, found, strict=True):
            for number, grad in enumerate(grads):
                alone = step[0][number]
                mean = expected_mean([of_rank[number] for of_rank in step], samples)
                assert_same_bits(grad, alone if size == 1 else mean)


def test_one_trainer_is_left_alone():
    (group,) = strict_groups(1)
    parameters = [("half", nn.Parameter(torch.ones(3, dtype=torch.float64)))]
    sync = DenseSync(parameters, group, None)
    sync.begin(3, 3)
    (parameters[0][1] * 2).sum().backward()
    sync.skip()
    assert parameters[0][1].grad.tolist() == [2, 2, 2]
    assert not parameters[0][1]._post_accumulate_grad_hooks


def test_every_parameter_of_a_model_steps_alike_on_all_trainers():
    """A shared layer, a frozen one, one on no path; two iterations with an optimizer."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
            self.again = self.first
            self.frozen, self.unused = nn.Linear(4, 4).requires_grad_(False), nn.Linear(2, 2)

        def forward(self, x):
            return self.last(self.again(self.frozen(self.first(x)).relu()))

    inputs = torch.randn(2, 10, 4, generator=torch.Generator().manual_seed(5))
    parts = [(0, 7), (7, 7), (7, 10)]
    lock = threading.Lock()

    def make():
        with lock:
            torch.manual_seed(1)
            return Model()

    def body(rank, group, driver):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sync = DenseSync(model.named_parameters(), group, driver, bucket_bytes=60)
        for batch in inputs:
            start, stop = parts[rank]
            sync.begin(stop - start, len(batch))
            optimizer.zero_grad()
            model(batch[start:stop]).mean().backward()
            assert model.unused.weight.grad is None
            optimizer.step()
        sync.close()
        driver.join()
        return model.state_dict()

    states = all_fine(run_ranks(3, body))
    plain = make()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for batch in inputs:
        optimizer.zero_grad()
        plain(batch).mean().backward()
        optimizer.step()
    for name, value in plain.state_dict().items():
        assert_same_bits(states[0][name], states[1][name])
        assert_same_bits(states[0][name], states[2][name])
        torch.testing.assert_close(states[0][name], value)


def test_micro_batches_stay_local_until_the_last_and_count_by_their_own_samples():
    parts = [[(2, 4), (0, 4), (1, 2)], [(2, 4), (4, 4), (1, 2)]]  # (samples, total) of three micro-batches
    drawn = np.random.default_rng(0)
    grads = [[draw_grads(drawn, SHAPES) for _ in range(3)] for _ in range(2)]

    def body(rank, group, driver):
        parameters = make_parameters()
        sync = DenseSync(parameters, group, driver)
        for micro, (samples, total) in enumerate(parts[rank]):
            sync.begin(samples, total, last=micro == 2)
            given = [grad if samples else grad * torch.nan for grad in grads[rank][micro]]
            backward(parameters, given)
            assert sync._passes == (micro == 2)
        sync.close()
        driver.join()
        return [p.grad for _, p in parameters]

    for found in all_fine(run_ranks(2, body)):
        for number, grad in enumerate(found):
            expected = torch.zeros(SHAPES[number])
            for rank in range(2):
                for micro, (samples, total) in enumerate(parts[rank]):
                    expected += grads[rank][micro][number] * (samples / total)
            torch.testing.assert_close(grad, expected)


def test_a_micro_batch_that_the_script_clears_is_forgotten():
    def body(rank, group, driver):
        parameters = make_parameters([(2,)])
        sync = DenseSync(parameters, group, driver)
        sync.begin(1, 2, last=False)
        backward(parameters, [torch.full((2,), 100.0)])
        parameters[0][1].grad = None
        sync.begin(1, 2)
        backward(parameters, [torch.tensor([1.0, 3.0]) + rank])
        sync.close()
        driver.join()
        return parameters[0][1].grad.tolist()

    assert all_fine(run_ranks(2, body)) == [[1.5, 3.5]] * 2


def test_several_backward_passes_and_gradients_that_were_not_cleared_add_up():
    def body(rank, group, driver):
        parameters = make_parameters([(2,), (1,), (1,)])
        sync = DenseSync(parameters, group, driver)
        first, second, third = (parameter for _, parameter in parameters)
        first.grad = held = torch.tensor([10.0, 20.0])
        sync.begin(1 + rank, 3)
        backward(parameters, [torch.ones(2), None, None])
        backward(parameters, [torch.ones(2) * 2, torch.ones(1) * (1 + rank), None])
        assert first.grad is held
        assert (held.tolist(), second.grad.item()) == ([13, 23], pytest.approx(5 / 3))
        assert third.grad is None
        sync.begin(1, 2)
        first.grad.zero_()
        second.grad = None
        backward(parameters, [torch.ones(2) * rank, None, None])
        assert second.grad is None
        sync.close()
        driver.join()
        return first.grad.tolist()

    assert all_fine(run_ranks(2, body)) == [[0.5, 0.5]] * 2


def test_gradients_that_are_asked_for_by_hand_are_none_of_our_business():
    def body(rank, group, driver):
        parameters = make_parameters([(2,)])
        (_, parameter), sync = parameters[0], DenseSync(parameters, group, driver)
        sync.begin(1, 2)
        (grad,) = torch.autograd.grad((parameter * (rank + 1)).sum(), parameter)
        backward(parameters, [torch.ones(2) * rank])
        sync.close()
        driver.join()
        backward(parameters, [torch.ones(2) * rank])
        return grad.tolist(), parameter.grad.tolist()

    assert all_fine(run_ranks(2, body)) == [([1, 1], [0.5, 0.5]), ([2, 2], [1.5, 1.5])]


def test_a_bucket_is_exchanged_while_the_backward_pass_still_runs():
    begun = [threading.Event() for _ in range(2)]

    class Pause(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values, event):
            ctx.event = event
            return values.clone()

        @staticmethod
        def backward(ctx, grad):
            assert ctx.event.wait(20)
            return grad, None

    def body(rank, group, driver):
        parameters = make_parameters([(2,), (2,)])
        (_, early), (_, late) = parameters
        sync = DenseSync(parameters, group, driver, bucket_bytes=1)
        exchange = group.exchange

        def watched(send, receive, what):
            if "part 1 of 2" in what:
                begun[rank].set()
            return exchange(send, receive, what)

        group.exchange = watched
        sync.begin(1, 2)
        (Pause.apply(early * 1, begun[rank]) * late).sum().backward()
        sync.close()
        driver.join()
        return torch.equal(early.grad, late.detach())

    assert all(all_fine(run_ranks(2, body)))


def test_trainers_that_begin_with_other_values_are_told_the_first_parameter():
    def body(rank, group, driver):
        parameters = make_parameters([(2,), (3,), (1,)])
        parameters[1][1].data[2] = -0.0 if rank == 2 else 0.0
        sync = DenseSync(parameters, group, driver)
        sync.begin(1, 3)
        backward(parameters, [torch.ones(2), None, None])

    for result in run_ranks(3, body):
        assert isinstance(result, ModelError)
        assert "'p1' begins with other values on trainer 2 than on trainer 0" in str(result)


def test_trainers_with_other_models_are_told():
    def body(rank, group, driver):
        parameters = make_parameters([(2,), (3,)][: 1 + rank])
        sync = DenseSync(parameters, group, driver)
        sync.begin(1, 2)
        backward(parameters, [torch.ones(2), torch.ones(3)][: 1 + rank])

    for result in run_ranks(2, body):
        assert isinstance(result, ModelError)
        assert "trainer 1 has other dense parameters than trainer 0" in str(result)


def test_a_trainer_that_fails_before_its_backward_pass_ends_the_wait_of_the_others():
    def body(rank, group, driver):
        parameters = make_parameters([(2,)])
        sync = DenseSync(parameters, group, driver)
        sync.begin(1, 3)
        if rank == 1:
            group.abort(error := ValueError("bad batch"))
            sync.close()
            raise error
        backward(parameters, [torch.ones(2)])

    results = run_ranks(3, body)
    assert isinstance(results[1], ValueError)
    for result in (results[0], results[2]):
        assert isinstance(result, PipelineError)
        assert "trainer 1 failed: ValueError: bad batch" in str(result)


def test_a_backward_pass_that_was_interrupted_ends_training():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("broken layer")

    def body(rank, group, driver):
        parameters = make_parameters([(2,), (2,)])
        (_, early), (_, late) = parameters
        sync = DenseSync(parameters, group, driver)
        sync.begin(1, 2)
        inner = Broken.apply(early * 1) if rank else early * 1
        try:
            (inner * late).sum().backward()
        except ValueError as error:
            with pytest.raises(PipelineError, match="pass of trainer 1 was interrupted"):
                sync.begin(1, 2)
            sync.close(error)

    assert "trainer 1 failed: ValueError: broken layer" in str(run_ranks(2, body)[0])


def test_a_backward_pass_that_others_leave_out_ends_in_a_deadline_that_says_so():
    def body(rank, group, driver):
        parameters = make_parameters([(2,)])
        sync = DenseSync(parameters, group, driver)
        sync.begin(1, 2)
        if rank == 0:
            with pytest.raises(DeadlineError, match=r"dense gradients of pass 1, part 1 of 1, of other trainers"):
                backward(parameters, [torch.ones(2)])
            done.set()
        assert done.wait(20)
        sync.close()
        return True

    done = threading.Event()
    assert run_ranks(2, body, 0.5) == [True, True]


@pytest.mark.parametrize(
    ("thawed", "message"), [(True, "'p1' was frozen when"), (False, "is sparse: make its layer with sparse=False")]
)
def test_what_can_not_be_averaged_is_refused_by_name(thawed, message):
    (group, _) = strict_groups(2)
    driver = Threads(5)
    layer = nn.Embedding(3, 2, sparse=True)
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    sync = DenseSync([("p0", layer.weight), ("p1", frozen)], group, driver)
    sync.begin(1, 2)
    frozen.requires_grad_(thawed)

    def next_batch():
        sync.begin(1, 2)
        layer(torch.tensor([1])).sum().backward()

    with pytest.raises(ModelError, match=message):
        next_batch()
    group.abort("enough")
    sync.close()
    driver.join()


def test_gradients_with_a_graph_of_their_own_are_refused():
    (group, _) = strict_groups(2)
    driver = Threads(5)
    parameters = make_parameters([(2,)])
    sync = DenseSync(parameters, group, driver)
    sync.begin(1, 2)
    with pytest.raises(ModelError, match="create_graph"), pytest.warns(UserWarning, match="create_graph"):
        (parameters[0][1] ** 2).sum().backward(create_graph=True)
    group.abort("enough")
    sync.close()
    driver.join()


def test_parameters_of_another_precision_are_refused():
    (group, _) = strict_groups(2)
    with pytest.raises(ModelError, match=r"'w' is torch.float64: .* model.float\(\)"):
        DenseSync([("w", nn.Parameter(torch.ones(2, dtype=torch.float64)))], group, Threads(5))
