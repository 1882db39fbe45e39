"""Evaluation whose rows are read ahead gives what the model gives on plain batches, and changes nothing."""

import threading

import pytest
import torch

import bagpipe
from bagpipe.errors import BatchError, ModelError, ValueRangeError
from harness.plain import loss_of, make_batches, make_net, nothing_left  # noqa: F401
from harness.twice import SMALL, adagrad

pytestmark = pytest.mark.usefixtures("nothing_left")

VALIDATION = make_batches(num_batches=5, size=7, seed=9)


@pytest.fixture
def prepared():
    model = make_net()
    model, optimizer, loader = bagpipe.prepare(model, adagrad(model), make_batches(), **SMALL)
    with loader:
        yield model, optimizer, loader
    loader.loop.store.close()


def step(model, optimizer, batch):
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


def predictions(model, batches):
    with torch.no_grad():
        return [model(batch) for batch in batches]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    assert all(one.numpy().tobytes() == other.numpy().tobytes() for one, other in zip(found, expected, strict=True))


def test_before_amid_and_after_training_the_bits_are_those_of_plain_calls(prepared):
    model, optimizer, loader = prepared
    validation = loader.for_evaluation(VALIDATION)
    assert len(validation) == len(VALIDATION)
    assert_equal(predictions(model, validation), predictions(model, VALIDATION))
    for batch in loader:
        step(model, optimizer, batch)
        assert_equal(predictions(model, validation), predictions(model, VALIDATION))
    assert_equal(predictions(model, validation), predictions(model, VALIDATION))
    stats = validation.stats()
    assert stats["batches"] == len(VALIDATION)
    assert stats["batches_per_second"] > 0


def test_training_goes_on_as_if_nobody_had_evaluated():
    digests = []
    for evaluates in (False, True):
        model = make_net()
        model, optimizer, loader = bagpipe.prepare(model, adagrad(model), make_batches(), **SMALL)
        validation = loader.for_evaluation(VALIDATION)
        with loader:
            for batch in loader:
                if evaluates:
                    predictions(model, validation)  # before the step too: the batch in training stays
                step(model, optimizer, batch)
            state = {name: value.numpy().tobytes() for name, value in model.state_dict().items()}
        digests.append((state, loader.stats()["fetched_rows"]))
        loader.loop.store.close()
    assert digests[0] == digests[1]


def test_its_own_training_batches_can_be_evaluated_too(prepared):
    model, optimizer, loader = prepared
    data = make_batches()
    for number, batch in enumerate(loader):
        step(model, optimizer, batch)
        if number == 3:
            assert_equal(predictions(model, loader.for_evaluation(data)), predictions(model, data))


def test_a_loop_that_is_left_leaves_nothing_and_training_goes_on(prepared):
    model, optimizer, loader = prepared
    validation = loader.for_evaluation(VALIDATION)
    threads = threading.active_count()
    for number, batch in enumerate(loader):
        if number == 2:
            during = threading.active_count()
            for first in validation:
                predictions(model, [first])
                break
            assert threading.active_count() == during
        step(model, optimizer, batch)
    assert threading.active_count() == threads


def test_ids_that_the_model_makes_are_looked_up_too(prepared):
    model, _, loader = prepared
    with torch.no_grad():
        expected = model.user(torch.tensor([[29], [0]]))
        for _ in loader.for_evaluation(VALIDATION):
            assert torch.equal(model.user(torch.tensor([[29], [0]])), expected)


def test_a_backward_pass_is_refused(prepared):
    model, _, loader = prepared
    for batch in loader.for_evaluation(VALIDATION):
        with pytest.raises(ModelError, match="outside of the training loop"):
            loss_of(model, batch).backward()
        break


def test_training_meanwhile_is_refused(prepared):
    model, optimizer, loader = prepared
    validation, training = iter(loader.for_evaluation(VALIDATION)), iter(loader)
    next(validation)
    batch = next(training)
    step(model, optimizer, batch)
    with pytest.raises(ModelError, match="was trained while batches were read ahead for evaluation"):
        next(validation)
    step(model, optimizer, next(training))  # which is none the worse for it


def test_what_is_wrong_with_its_data_is_said_with_the_batch(prepared):
    model, _, loader = prepared
    bad = [dict(batch) for batch in VALIDATION]
    bad[2]["user"] = bad[2]["user"] + 1000
    reading = iter(loader.for_evaluation(bad))
    assert_equal(predictions(model, [next(reading), next(reading)]), predictions(model, VALIDATION[:2]))
    with pytest.raises(ValueRangeError, match="'user'"):
        next(reading)
    del bad[1]["item"]
    with pytest.raises(BatchError, match="item"):
        predictions(model, loader.for_evaluation(bad))
    with pytest.raises(BatchError, match="yields batches"):
        loader.for_evaluation(7)


def test_a_loader_that_fills_its_buffers_again_is_refused(prepared):
    model, _, loader = prepared

    class Refilled:
        def __iter__(self):
            own = {name: value.clone() for name, value in VALIDATION[0].items()}
            for batch in VALIDATION:
                for name, value in batch.items():
                    own[name].copy_(value)
                yield own

    with pytest.raises(BatchError, match="overwritten"):
        predictions(model, loader.for_evaluation(Refilled()))


def test_an_error_of_the_loader_comes_after_the_batches_before_it(prepared):
    model, _, loader = prepared

    def failing():
        yield VALIDATION[0]
        raise OSError("the disk is gone")

    reading = iter(loader.for_evaluation(failing()))
    assert next(reading) is VALIDATION[0]
    with pytest.raises(OSError, match="the disk is gone"):
        next(reading)
    assert predictions(model, VALIDATION[:1])[0].shape == (7,)
