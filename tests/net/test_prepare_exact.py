"""A prepared script ends with the bits of the reference: one trainer and several, epoch after epoch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bagpipe import Cache, Options, clip_grad_norm_, optim, prepare
from bagpipe.errors import ModelError, PipelineError
from bagpipe.state import of_store
from harness.scripts import Trainers
from harness.seams import Assigner
from harness.world import (
    OPTIMIZERS,
    TABLES,
    assert_identical,
    dense_sgd,
    initial,
    make_batches,
    make_model,
    train_reference,
)

NAME = "wide_deep"
FEATURES = [table.features for table in TABLES]


def run(trainers, batches, optimizer="adagrad", epochs=2, before_step=lambda model, loader: None, **cache):
    """The state that N trainers end with, each running the same script."""

    def optimizers(model):
        return [dense_sgd([each for each in model.parameters() if not each.is_meta])]

    return run_with(trainers, batches, optimizers, OPTIMIZERS[optimizer], epochs, before_step, **cache)


def run_with(
    trainers,
    batches,
    make,
    rows=lambda: None,
    epochs=2,
    before_step=lambda model, loader: None,
    make_after=None,
    **cache,
):
    """The same with the optimizers that `make` gives for a model; what `make_after` gives for them is stepped too."""
    models = [make_model(NAME) for _ in range(trainers.trainers)]

    def script(rank):
        model = models[rank]
        model, optimizers, loader = prepare(
            model, make(model), batches, rows=rows(), cache=Cache(300, **cache), features=TABLES,
            store=trainers.options(rank)["store"], options=Options(initial=initial),
        )  # fmt: skip
        stepped = [*optimizers, *([] if make_after is None else make_after(optimizers))]
        for _ in range(epochs):
            for batch in loader:
                loss = nn.functional.binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.labels)
                for each in optimizers:
                    each.zero_grad()
                loss.backward()
                before_step(model, loader)
                for each in stepped:
                    each.step()
        names = [layout.table.name for layout in loader.loop.layouts]
        return of_store(model, names, trainers.store)

    results = trainers.run(script)
    for state in results[1:]:
        assert_identical(results[0], state)
    return results[0]


def reference(batches, optimizer="adagrad", trainers=1, epochs=2):
    return reference_with(batches, OPTIMIZERS[optimizer](), trainers, epochs)


def reference_with(batches, rows, trainers=1, epochs=2):
    assign = Assigner("contiguous", trainers, 0, FEATURES)
    return train_reference(batches * epochs, rows, NAME, trainers, assign)[0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_row_optimizer_has_the_bits_of_the_reference(optimizer):
    batches = make_batches(8, last=3)
    assert_identical(reference(batches, optimizer), run(Trainers(1), batches, optimizer))


def in_two(kind, **settings):
    """SGD for dense parameters, and this one of torch for the weights of layers."""

    def make(model):
        weights = [each for each in model.parameters() if each.is_meta]
        return [dense_sgd([each for each in model.parameters() if not each.is_meta]), kind(weights, **settings)]

    return make


TRANSLATED = {
    "SGD of all": (lambda model: [dense_sgd(model.parameters())], lambda: optim.SGD(0.1)),
    "SGD": (in_two(torch.optim.SGD, lr=0.3), lambda: optim.SGD(0.3)),
    "Adagrad": (in_two(torch.optim.Adagrad, lr=0.2), lambda: optim.Adagrad(0.2)),
    "Adagrad, its settings": (
        in_two(torch.optim.Adagrad, lr=0.2, lr_decay=0.1, initial_accumulator_value=0.3, eps=1e-3),
        lambda: optim.Adagrad(0.2, lr_decay=0.1, initial_accumulator_value=0.3, eps=1e-3),
    ),
    "SparseAdam": (in_two(torch.optim.SparseAdam, lr=0.05), lambda: optim.Adam(0.05)),
    "SparseAdam, its settings": (
        in_two(torch.optim.SparseAdam, lr=0.05, betas=(0.8, 0.9), eps=1e-4),
        lambda: optim.Adam(0.05, betas=(0.8, 0.9), eps=1e-4),
    ),
}


@pytest.mark.parametrize("trainers", [1, 3])
@pytest.mark.parametrize(("make", "rows"), TRANSLATED.values(), ids=TRANSLATED)
def test_a_translated_optimizer_has_the_bits_of_the_reference(make, rows, trainers):
    batches = make_batches(8, last=3)
    assert_identical(reference_with(batches, rows(), trainers), run_with(Trainers(trainers), batches, make))


@pytest.mark.parametrize("trainers", [1, 2])
def test_a_scheduler_of_a_translated_optimizer_has_the_bits_of_a_schedule(trainers):
    batches = make_batches(8, last=3)

    def factor(step):
        return 1 / (1 + step)

    def scheduler(optimizers):
        return [torch.optim.lr_scheduler.LambdaLR(optimizers[1], factor)]

    found = run_with(Trainers(trainers), batches, in_two(torch.optim.Adagrad, lr=0.2), make_after=scheduler)
    assert_identical(reference_with(batches, optim.Adagrad(lambda step: 0.2 * factor(step)), trainers), found)


@pytest.mark.parametrize("trainers", [1, 2])
def test_a_schedule_of_rows_moves_the_rate_of_all_layers(trainers):
    def rows():
        return optim.Adam(lambda step: 0.05 / (1 + step))

    batches = make_batches(8, last=3)
    found = run_with(Trainers(trainers), batches, lambda model: [dense_sgd(model.parameters())], rows)
    assert_identical(reference_with(batches, rows(), trainers), found)


@pytest.mark.parametrize("trainers", [1, 2])
def test_rows_by_table_have_the_bits_of_the_reference(trainers):
    def rows():
        return optim.PerTable(optim.SGD(0.1), {"ad": optim.Adagrad(0.2), "word": optim.Adam(0.05)})

    batches = make_batches(8, last=3)
    found = run_with(Trainers(trainers), batches, lambda model: [dense_sgd(model.parameters())], rows)
    assert_identical(reference_with(batches, rows(), trainers), found)


@pytest.mark.parametrize("lookahead", [1, 3, "auto"])
@pytest.mark.parametrize("policy", ["lookahead", "lru", "belady"])
def test_every_lookahead_and_policy_has_the_bits_of_the_reference(lookahead, policy):
    batches = make_batches(8, last=3)
    found = run(Trainers(1), batches, lookahead=lookahead, policy=policy)
    assert_identical(reference(batches), found)


@pytest.mark.parametrize("design", ["owned", "partitioned", "replicated", "lrpp"])
@pytest.mark.parametrize("trainers", [2, 3])
def test_several_trainers_have_the_bits_of_the_reference(trainers, design):
    batches = make_batches(8, last=3)
    found = run(Trainers(trainers, f"sync.design={design}"), batches)
    assert_identical(reference(batches, trainers=trainers), found)


def test_several_trainers_clip_by_the_norm_of_all_gradients():
    batches = make_batches(6)
    norms = []

    def clip(model, loader):
        norms.append(float(clip_grad_norm_(model.parameters(), loader, 0.01)))

    run(Trainers(2), batches, before_step=clip)
    assert len(norms) == 2 * 2 * 6
    assert min(norms) > 0.01
    assert sorted(norms)[::2] == sorted(norms)[1::2], "all trainers see the same norm"


def test_gradients_of_rows_are_not_read_before_trainers_have_shared_them():
    def clip(model, loader):
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    trainers = Trainers(2)
    with pytest.raises((ModelError, PipelineError), match=r"with several trainers.*bagpipe\.clip_grad_norm_"):
        run(trainers, make_batches(4), before_step=clip)


def test_evaluation_amid_an_epoch_wants_all_trainers_to_flush():
    others = make_batches(2, seed=9)

    def evaluate(flush):
        def before_step(model, loader):
            if flush:
                loader.flush()
            with torch.no_grad():
                model(others[0].dense, others[0].sparse)

        return before_step

    batches = make_batches(5)
    assert_identical(reference(batches, trainers=2), run(Trainers(2), batches, before_step=evaluate(flush=True)))
    with pytest.raises((ModelError, PipelineError), match=r"let all trainers call flush\(\) first"):
        run(Trainers(2), batches, before_step=evaluate(flush=False))
