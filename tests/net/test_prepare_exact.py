"""A prepared script ends with the bits of the reference: one trainer and several, epoch after epoch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bagpipe import Cache, Options, clip_grad_norm_, prepare
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
    models = [make_model(NAME) for _ in range(trainers.trainers)]

    def script(rank):
        model = models[rank]
        dense = dense_sgd([each for each in model.parameters() if not each.is_meta])
        model, dense, loader = prepare(
            model, dense, batches, rows=OPTIMIZERS[optimizer](), cache=Cache(300, **cache), features=TABLES,
            store=trainers.options(rank)["store"], options=Options(initial=initial),
        )  # fmt: skip
        for _ in range(epochs):
            for batch in loader:
                loss = nn.functional.binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.labels)
                dense.zero_grad()
                loss.backward()
                before_step(model, loader)
                dense.step()
        names = [layout.table.name for layout in loader.loop.layouts]
        return of_store(model, names, trainers.store)

    results = trainers.run(script)
    for state in results[1:]:
        assert_identical(results[0], state)
    return results[0]


def reference(batches, optimizer="adagrad", trainers=1, epochs=2):
    assign = Assigner("contiguous", trainers, 0, FEATURES)
    return train_reference(batches * epochs, OPTIMIZERS[optimizer](), NAME, trainers, assign)[0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_row_optimizer_has_the_bits_of_the_reference(optimizer):
    batches = make_batches(8, last=3)
    assert_identical(reference(batches, optimizer), run(Trainers(1), batches, optimizer))


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
