"""Corners of the promises of `bagpipe.prepare`: optimizers, gradients, steps, weights, checkpoints, ends."""

from __future__ import annotations

import copy
import gc
import re
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

import bagpipe
from bagpipe.errors import BatchError, CheckpointError, ConfigError, GradientError, ModelError, PipelineError
from harness.plain import (
    assert_close,
    loss_fn,
    loss_of,
    make_batches,
    make_net,
    nothing_left,  # noqa: F401
    threads_left,
)
from harness.scripts import Trainers
from harness.twice import (
    SMALL,
    adagrad,
    adam_and_sparse_adam,
    assert_equal_to_plain,
    epochs,
    listed,
    refuses,
    rest_of,
    run,
    sgd,
    sparse_net,
    weights_of,
)

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.* before"),
]


def prepared(optimizer=adagrad, model=make_net, loader=make_batches, **options):
    made = model()
    return bagpipe.prepare(made, optimizer(made), loader(), **SMALL | options)


def everything(model, optimizer):
    """Parameters, rows, and states of optimizers."""
    states = [copy.deepcopy(each.state_dict()["state"]) for each in listed(optimizer)]
    return {name: value.clone() for name, value in model.state_dict().items()}, states


def assert_unchanged(before, after):
    for name, value in before[0].items():
        assert torch.equal(value, after[0][name]), name
    for was, now in zip(before[1], after[1], strict=True):
        assert was.keys() == now.keys()
        for key, state in was.items():
            assert all(torch.equal(torch.as_tensor(now[key][name]), torch.as_tensor(v)) for name, v in state.items())


# What would move rows that a batch does not name


def of_torch(kind, **settings):
    return lambda model: kind(model.parameters(), lr=0.01, **settings)


class Unknown(torch.optim.SGD):
    """Nobody knows what it does."""


MOVES_ALL_ROWS = {
    "Adam": (of_torch(torch.optim.Adam), "Adam"),
    "AdamW": (of_torch(torch.optim.AdamW), "AdamW"),
    "AdamW without decay": (of_torch(torch.optim.AdamW, weight_decay=0.0), "AdamW"),
    "Adam with amsgrad": (of_torch(torch.optim.Adam, amsgrad=True), "Adam"),
    "SGD with momentum": (of_torch(torch.optim.SGD, momentum=0.9), "Momentum"),
    "SGD with Nesterov's": (of_torch(torch.optim.SGD, momentum=0.9, nesterov=True), "Momentum"),
    "SGD with decay": (of_torch(torch.optim.SGD, weight_decay=0.1), "AdamW"),
    "Adagrad with decay": (of_torch(torch.optim.Adagrad, weight_decay=0.1), "AdamW"),
    "RMSprop": (of_torch(torch.optim.RMSprop), "Adagrad"),
    "Adadelta": (of_torch(torch.optim.Adadelta), "Adagrad"),
    "Adamax": (of_torch(torch.optim.Adamax), "Adam"),
    "NAdam": (of_torch(torch.optim.NAdam), "Adam"),
    "RAdam": (of_torch(torch.optim.RAdam), "Adam"),
    "ASGD": (of_torch(torch.optim.ASGD), "Adagrad"),
    "Rprop": (of_torch(torch.optim.Rprop), "Adagrad"),
    "Adafactor": (of_torch(torch.optim.Adafactor), "Adagrad"),
}
SETTINGS = {"lr": "0.01", "momentum": "0.9", "weight_decay=...": "weight_decay=0.1"}


@pytest.mark.parametrize(("optimizer", "meant"), MOVES_ALL_ROWS.values(), ids=MOVES_ALL_ROWS)
def test_what_moves_rows_that_a_batch_does_not_name_is_refused_and_the_advice_trains(optimizer, meant):
    with pytest.raises(ConfigError, match=r"layer 'user' is in a .*rows=bagpipe\.optim\.") as refused:
        prepared(optimizer)
    (kind, given) = re.search(r"rows=bagpipe\.optim\.(\w+)\((.*?)\)", str(refused.value)).groups()
    assert kind == meant
    words = ", ".join(SETTINGS[word] for word in given.split(", "))
    rows = eval(f"bagpipe.optim.{kind}({words})")
    model, optimizer, loader = prepared(optimizer, rows=rows)
    before = model.state_dict()["user.weight"].clone()
    named = torch.unique(torch.cat([batch["user"].reshape(-1) for batch in make_batches()]))
    epochs(model, optimizer, loader, [])
    moved = (model.state_dict()["user.weight"] != before).any(1).nonzero().reshape(-1)
    assert set(moved.tolist()) == set(named.tolist())


@pytest.mark.parametrize("rows", [None, bagpipe.optim.SGD(0.1)], ids=["translated", "rows="])
def test_a_loss_is_not_maximised_for_dense_parameters_and_minimised_for_rows(rows):
    with pytest.raises(ConfigError, match=r"layer 'user' is in a SGD with maximize=True.* loss the other sign"):
        prepared(of_torch(torch.optim.SGD, maximize=True), rows=rows)


def test_dense_parameters_of_another_optimizer_may_be_maximised():
    def optimizers(model):
        minimised = [each for each in model.parameters() if each is not model.factor]
        return [torch.optim.SGD(minimised, lr=0.1), torch.optim.SGD([model.factor], lr=0.1, maximize=True)]

    def model():
        net = make_net()
        net.factor = nn.Parameter(torch.ones(1))
        return net

    def loss(model, batch):
        return loss_of(model, batch) * (1 + 0.1 * model.factor.square().sum())

    assert_equal_to_plain(partial(epochs, loss_of=loss), model=model, optimizer=optimizers)


def test_a_class_that_nobody_knows_is_refused_and_trains_dense_parameters_beside_rows():
    with pytest.raises(ConfigError, match=r"in a Unknown, and what that does to rows is not known: give rows=bagpipe"):
        prepared(of_torch(Unknown))
    model, optimizer, loader = prepared(of_torch(Unknown), rows=bagpipe.optim.SGD(0.01))
    epochs(model, optimizer, loader, [])
    expected = run(epochs, False, optimizer=of_torch(torch.optim.SGD))
    assert_close(expected.weights, {name: value.clone() for name, value in model.state_dict().items()})


@pytest.mark.parametrize("rows", [None, bagpipe.optim.SGD(0.1)], ids=["translated", "rows="])
def test_lbfgs_is_refused_whoever_updates_rows(rows):
    with pytest.raises(ConfigError, match="LBFGS makes several passes"):
        prepared(of_torch(torch.optim.LBFGS), rows=rows)


CYCLES = {
    "OneCycleLR": (lr_scheduler.OneCycleLR, {"max_lr": 0.4, "total_steps": 20}),
    "CyclicLR": (lr_scheduler.CyclicLR, {"base_lr": 0.1, "max_lr": 0.4}),
}


@pytest.mark.parametrize(("kind", "settings"), CYCLES.values(), ids=CYCLES)
@pytest.mark.parametrize("built", ["before", "after"])
def test_momentum_that_a_scheduler_sets_is_refused_by_name_and_moves_nothing(kind, settings, built):
    model = make_net()
    optimizer = sgd(model, lr=0.1)
    if built == "before":
        kind(optimizer, **settings)
        with pytest.raises(ConfigError, match=r"momentum=0\.\d+: it moves rows.*say cycle_momentum=False"):
            bagpipe.prepare(model, optimizer, make_batches(), **SMALL)
        return
    model, optimizer, loader = bagpipe.prepare(model, optimizer, make_batches(), **SMALL)
    kind(optimizer, **settings)
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        before = everything(model, optimizer)
        with pytest.raises(ConfigError, match=r"momentum=0\.\d+: it moves rows.*say cycle_momentum=False"):
            optimizer.step()
        assert_unchanged(before, everything(model, optimizer))


@pytest.mark.parametrize("when", ["group", "weight"])
@pytest.mark.parametrize("rows", [None, bagpipe.optim.SGD(0.1)], ids=["translated", "rows="])
def test_a_weight_that_is_taken_out_of_its_group_is_refused_and_moves_nothing(when, rows):
    """Plain PyTorch would leave it alone."""

    def optimizer(model):
        return torch.optim.SGD([{"params": rest_of(model)}, {"params": weights_of(model)}], lr=0.1)

    model, optimizer, loader = prepared(optimizer, rows=rows and bagpipe.optim.SGD(0.1))
    batches = iter(loader)
    for number in range(2):
        optimizer.zero_grad()
        loss_of(model, next(batches)).backward()
        if number:
            break
        optimizer.step()
    if when == "group":
        optimizer.param_groups.pop()
    else:
        optimizer.param_groups[-1]["params"].pop()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match=r"layer '\w+' was taken out of the param groups.*requires_grad_\(False\)"):
        optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    batches.close()


def test_a_weight_that_moves_to_another_group_has_its_rate():
    def script(model, optimizer, loader, log):
        epochs(model, optimizer, loader, log, number=1)
        optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())
        epochs(model, optimizer, loader, log, number=1)

    def optimizer(model):
        return torch.optim.SGD([{"params": weights_of(model)}, {"params": rest_of(model), "lr": 0.02}], lr=0.3)

    assert_equal_to_plain(script, optimizer=optimizer)


# Gradients


@pytest.mark.parametrize(
    ("optimizer", "model"),
    [(sgd, make_net), (partial(adagrad, lr_decay=0.5), make_net), (adam_and_sparse_adam, sparse_net)],
    ids=["SGD", "Adagrad", "SparseAdam"],
)
def test_a_row_with_a_gradient_of_nothing_is_a_row_that_was_reached(optimizer, model):
    def script(model, optimizer, loader, log):
        for _ in range(2):
            for number, batch in enumerate(loader):
                for each in listed(optimizer):
                    each.zero_grad()
                (loss_of(model, batch) * (0.0 if number % 3 else 1.0)).backward()
                for each in listed(optimizer):
                    each.step()

    assert_equal_to_plain(script, optimizer=optimizer, model=model)


def test_large_gradients_whose_sum_is_not_finite_are_gradients():
    def script(model, optimizer, loader, log):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            model.top[0].weight.grad.fill_(3e38)
            model.user.weight.grad.mul_(1e-3)
            optimizer.step()

    assert_equal_to_plain(script, moved=False)


@pytest.mark.parametrize("first", ["dense", "rows"])
@pytest.mark.parametrize("wrong", ["dense", "rows"])
def test_of_two_optimizers_neither_moves_anything_if_a_gradient_of_either_is_not_finite(first, wrong):
    model, optimizers, loader = prepared(adam_and_sparse_adam, sparse_net)
    order = optimizers if first == "dense" else optimizers[::-1]
    for number, batch in enumerate(loader):
        for each in order:
            each.zero_grad()
        loss_of(model, batch).backward()
        if number == 3:
            (model.top[2].bias if wrong == "dense" else model.user.weight).grad.fill_(float("nan"))
            before = everything(model, optimizers)
            for each in order:  # also who goes on with the second one after the error of the first
                with pytest.raises(GradientError, match="not finite"):
                    each.step()
            assert_unchanged(before, everything(model, optimizers))
            continue
        for each in order:
            each.step()
    assert len(before[0]) == 6


def test_a_scaler_judges_each_of_two_optimizers_by_itself():
    def script(model, optimizers, loader, log):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=3)
        for number, batch in enumerate(loader):
            for each in optimizers:
                each.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            if number in (3, 5):
                wrong = model.user.weight.grad if number == 3 else model.top[2].bias.grad
                (wrong._values() if wrong.is_sparse else wrong).fill_(float("inf"))
            for each in optimizers:
                scaler.step(each)
            scaler.update()
            log.append(scaler.get_scale())

    assert_equal_to_plain(script, optimizer=adam_and_sparse_adam, model=sparse_net)


def test_a_dense_gradient_that_is_not_finite_is_found_at_every_step_of_a_batch():
    """Also at a second one, after everything was zeroed and computed anew."""
    model, optimizers, loader = prepared(adam_and_sparse_adam, sparse_net)
    for batch in loader:
        for number in range(2):
            for each in optimizers:
                each.zero_grad()
            loss_of(model, batch).backward()
            if number:
                model.top[2].bias.grad.fill_(float("inf"))
                before = everything(model, optimizers)
                for each in optimizers[::-1]:
                    with pytest.raises(GradientError, match="not finite"):
                        each.step()
                assert_unchanged(before, everything(model, optimizers))
            else:
                for each in optimizers:
                    each.step()


# The order of a step


def test_a_step_is_closure_then_hooks_then_checks_then_both_parts():
    model, optimizer, loader = prepared(sgd)
    seen = []

    def note(name):
        return lambda *_: seen.append(name)

    model.top[2].bias.register_hook(lambda grad: seen.append("backward") if "backward" not in seen else None)
    optimizer.register_step_pre_hook(note("before"))
    optimizer.register_step_post_hook(note("after"))
    for batch in loader:

        def closure(batch=batch):
            seen.append("closure")
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        seen.clear()
        before = everything(model, optimizer)[0]
        optimizer.step(closure)
        assert seen == ["before", "closure", "backward", "after"]  # torch's hooks are around a step with its closure
        assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("place", ["closure", "before", "after"])
def test_an_error_in_the_users_part_of_a_step_leaves_both_parts_or_neither(place):
    model, optimizer, loader = prepared(sgd)

    def fail(*_):
        raise KeyError(place)

    if place == "before":
        optimizer.register_step_pre_hook(fail)
    if place == "after":
        optimizer.register_step_post_hook(fail)
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        before = everything(model, optimizer)
        with pytest.raises(KeyError, match=place):
            optimizer.step(fail if place == "closure" else None)
        break
    after = everything(model, optimizer)
    if place == "after":
        expected = run(lambda m, o, batches, _: one_step(m, o, batches[0]), False, optimizer=sgd)
        assert_close(expected.weights, after[0])
    else:
        assert_unchanged(before, after)


def one_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


def test_rows_are_named_before_dense_parameters():
    model, optimizer, loader = prepared(sgd)
    for batch in loader:
        optimizer.zero_grad()
        (loss_of(model, batch) * float("nan")).backward()
        with pytest.raises(GradientError, match=r"gradient of row \d+ of table 'user' is not finite"):
            optimizer.step()
        break


def test_a_hook_before_the_step_changes_the_gradients_of_both():
    def script(model, optimizer, loader, log):
        def clip(*_):
            log.append(nn.utils.clip_grad_norm_(model.parameters(), 0.02).item())

        optimizer.register_step_pre_hook(clip)
        epochs(model, optimizer, loader, log)

    assert_equal_to_plain(script, optimizer=sgd)


REFUSED_STEPS = {
    "not zeroed": (ModelError, "not zeroed", {}, 1),
    "before the last batch": (ModelError, "step_due", {"accumulate": 4}, 0),
}


@pytest.mark.parametrize(("error", "words", "options", "at"), REFUSED_STEPS.values(), ids=REFUSED_STEPS)
def test_a_step_that_is_refused_moves_nothing(error, words, options, at):
    model, optimizer, loader = prepared(sgd, **options)
    for number, batch in enumerate(loader):
        loss_of(model, batch).backward()
        before = everything(model, optimizer)
        if number < at:
            optimizer.step()
            continue
        with pytest.raises(error, match=words):
            optimizer.step()
        assert_unchanged(before, everything(model, optimizer))
        break


def test_two_steps_for_a_batch_are_refused_with_several_trainers():
    trainers = Trainers(2)

    def script(rank):
        model = make_net()
        optimizer = sgd(model)
        options = SMALL | {"options": bagpipe.Options()}
        model, optimizer, loader = bagpipe.prepare(
            model, optimizer, make_batches(), **options, **trainers.options(rank)
        )
        for batch in loader:
            for _ in range(2):
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()

    for error in trainers.failures(script):
        assert isinstance(error, (ModelError, PipelineError))
        assert "step() twice for one batch" in str(error)


# What has all values of a weight, or another


LATE = [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop]


@pytest.mark.parametrize("kind", LATE, ids=lambda kind: kind.__name__)
def test_an_optimizer_built_after_prepare_says_when_to_build_it(kind):
    def script(model, optimizer, loader, log):
        late = kind(model.parameters(), lr=0.1)
        for batch in loader:
            loss_of(model, batch).backward()
            late.step()

    refuses(ModelError, r"build optimizers before bagpipe\.prepare", script)


def test_a_weight_given_to_a_functional_call_is_refused_by_the_name_of_its_layer():
    model, optimizer, loader = prepared()
    for batch in loader:
        with pytest.raises(ModelError, match=r"layer 'user' is called with another weight.*functional_call"):
            torch.func.functional_call(model, {"user.weight": torch.zeros(30, 4)}, (batch,))
        with torch.no_grad():  # which leaves the layer as it was
            one = torch.func.functional_call(model, {"top.0.weight": model.top[0].weight * 2}, (batch,))
            assert not torch.equal(one, model(batch))
        one_step(model, optimizer, batch)


def test_a_functional_call_with_the_parameters_that_there_are_trains():
    def script(model, optimizer, loader, log):
        for batch in loader:
            optimizer.zero_grad()
            out = torch.func.functional_call(model, dict(model.named_parameters()), (batch,))
            loss_fn(out, batch["label"]).backward()
            optimizer.step()

    assert_equal_to_plain(script)


CASTS = {
    "double": lambda model: model.double(),
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "to a type": lambda model: model.to(torch.float64),
    "to a type and a device": lambda model: model.to("cpu", torch.float64),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_a_model_that_would_become_one_of_other_numbers_is_refused(cast):
    model, optimizer, loader = prepared()
    with pytest.raises(ModelError, match=r"layer 'user' can't become torch\.\w+, its rows are float32: cast what is"):
        cast(model)
    epochs(model, optimizer, loader, [], number=1)


def test_what_keeps_the_numbers_of_a_model_is_no_cast():
    def script(model, optimizer, loader, log):
        model.to("cpu").float().to(torch.float32).cpu()
        model.to(memory_format=torch.contiguous_format)
        model.share_memory()
        epochs(model, optimizer, loader, log)

    assert_equal_to_plain(script)


def test_the_dense_part_may_be_cast_by_itself():
    def script(model, optimizer, loader, log):
        model.top.double()
        for batch in loader:
            optimizer.zero_grad()
            vectors = torch.cat([model.user(batch["user"]), model.item(batch["item"]), batch["dense"]], 1)
            out = model.top(vectors.double()).squeeze(1)
            loss_fn(out, batch["label"].double()).backward()
            optimizer.step()

    assert_equal_to_plain(script, optimizer=sgd)


def test_an_average_of_all_weights_is_refused():
    model, *_ = prepared()
    with pytest.raises(ModelError, match="can't be copied or pickled"):
        AveragedModel(model)


# Loaders


def test_an_iterator_that_was_broken_off_has_lost_what_was_read_ahead_and_says_so():
    source = iter(make_batches())
    model, optimizer, loader = prepared(loader=lambda: source)
    for number, batch in enumerate(loader):
        one_step(model, optimizer, batch)
        if number == 1:
            break
    with pytest.raises(BatchError, match="an iterator, which can be read once"):
        next(iter(loader))
    assert len(list(source)) < 6


def test_an_inner_loop_over_the_same_loader_ends_the_outer_one():
    model, optimizer, loader = prepared()

    def nested():
        for batch in loader:
            one_step(model, optimizer, batch)
            for inner in loader:
                one_step(model, optimizer, inner)

    with pytest.raises(ModelError, match="one at a time"):
        nested()
    expected = run(lambda m, o, batches, _: [one_step(m, o, batch) for batch in [batches[0], *batches]], False).weights
    assert_close(expected, {name: value.clone() for name, value in model.state_dict().items()})


SLICES = {
    "a column": lambda ids: ids[:, 0],
    "columns": lambda ids: ids[:, 1:],
    "every second column": lambda ids: ids[:, ::2],
    "samples": lambda ids: ids[1:4],
    "every second sample": lambda ids: ids[::2],
    "a sample": lambda ids: ids.select(0, 2),
    "turned round": lambda ids: ids.T,
    "by strides": lambda ids: torch.as_strided(ids, (3, 2), (1, 3), 4),
    "none": lambda ids: ids[:0],
}


@pytest.mark.parametrize("cut", SLICES.values(), ids=SLICES)
def test_a_part_of_a_buffer_names_the_rows_that_are_in_it(cut):
    def script(model, optimizer, loader, log):
        for batch in loader:
            optimizer.zero_grad()
            ids = cut(batch["item"])
            vectors = model.item(ids.reshape(-1, 1) if ids.dim() == 1 else ids)
            (vectors * torch.arange(1.0, vectors.numel() + 1).view(vectors.shape)).sum().backward()
            log.append(vectors.sum().item())
            optimizer.step()

    assert_equal_to_plain(script, optimizer=partial(sgd, lr=0.01), moved=False)


# Checkpoints


def saved(tmp_path, optimizer=adagrad, **more):
    made = bagpipe.Checkpointing(tmp_path, every=3, **more)
    model = make_net()
    own = optimizer(model)
    return bagpipe.prepare(model, own, make_batches(), **SMALL, checkpoint=made)


def test_a_scheduler_that_nobody_has_registered_is_refused_before_the_first_batch(tmp_path):
    model, optimizer, loader = saved(tmp_path)
    lr_scheduler.StepLR(optimizer, 3)
    with pytest.raises(CheckpointError, match=r"call loader\.register_for_checkpointing"):
        epochs(model, optimizer, loader, [], number=1)
    loader.register_for_checkpointing()
    with pytest.raises(CheckpointError, match=r"has a scheduler, .* loader\.register_for_checkpointing\(scheduler\)"):
        epochs(model, optimizer, loader, [], number=1)
    loader.close()
    assert list(tmp_path.glob("*/manifest.json")) == []


def test_a_run_that_goes_on_wants_to_know_its_epoch(tmp_path):
    model, optimizer, loader = saved(tmp_path)
    loader.register_for_checkpointing()
    epochs(model, optimizer, loader, [])
    loader.close()
    model, optimizer, loader = saved(tmp_path, resume=True)
    loader.register_for_checkpointing()
    with pytest.raises(CheckpointError, match=r"for epoch in range\(loader\.epoch, N\)"):
        epochs(model, optimizer, loader, [])
    loader.close()


def test_a_scheduler_goes_on_where_it_was(tmp_path):
    def train(stop=None, **more):
        model, optimizer, loader = saved(tmp_path, partial(adagrad, lr=0.4), **more)
        scheduler = lr_scheduler.StepLR(optimizer, 2, 0.5)
        loader.register_for_checkpointing(scheduler)
        for _ in range(loader.epoch, 1):
            for number, batch in enumerate(loader):
                one_step(model, optimizer, batch)
                scheduler.step()
                if number == stop:
                    break
        rate = optimizer.param_groups[0]["lr"]
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        loader.close()
        return rate, weights

    train(4)
    rate, weights = train(resume=True)
    assert rate == 0.4 / 2**4

    def script(model, optimizer, loader, log):
        scheduler = lr_scheduler.StepLR(optimizer, 2, 0.5)
        epochs(model, optimizer, loader, log, number=1, after_step=scheduler.step)

    assert_close(run(script, False, optimizer=partial(adagrad, lr=0.4)).weights, weights)


# Ends


@pytest.mark.parametrize("use", ["evaluation", "state_dict", "export", "close", "for"])
def test_after_the_collector_has_ended_an_iteration_any_use_sees_every_update(use, tmp_path):
    model, optimizer, loader = prepared()

    def left_in_a_cycle():
        held = iter(loader)
        for _ in range(3):
            one_step(model, optimizer, next(held))
        cycle = [held]
        cycle.append(cycle)

    gc.collect()
    gc.disable()
    try:
        left_in_a_cycle()
        collector = threading.Thread(target=gc.collect)
        collector.start()
        collector.join(60)
        assert not collector.is_alive()
    finally:
        gc.enable()
    plain, _, batches = make_net(), None, make_batches()
    own = adagrad(plain)
    for batch in batches[:3]:
        one_step(plain, own, batch)
    valid = make_batches(1, seed=4)[0]
    if use == "evaluation":
        with torch.no_grad():
            torch.testing.assert_close(model(valid), plain(valid))
    if use == "export":
        bagpipe.export(model, tmp_path / "model.safetensors")
    if use == "close":
        loader.close()
    if use == "for":
        epochs(model, optimizer, loader, [], number=1)
        epochs(plain, own, batches, [], number=1)
    assert_close(dict(plain.state_dict()), {name: value.clone() for name, value in model.state_dict().items()})
    loader.close()
    assert threads_left() == []


ENDS = {
    "sys.exit": ("for batch in loader: step(batch); sys.exit(3)", 3),
    "SIGTERM with a handler": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))\n"
        "for batch in loader: step(batch); signal.raise_signal(signal.SIGTERM)", 4),
    "two loaders": (
        "one, two = prepared(), prepared()\nheld = [iter(each[2]) for each in (one, two)]\n"
        "[next(each) for each in held]; print('end')", 0),
    "a thread trains": (
        "def work():\n    for batch in loader: step(batch); break\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join(); print('end')", 0),
    "an error at exit": (
        "held = iter(loader); step(next(held)); loader.loop.store.write_many = None; print('end')", 0),
}  # fmt: skip
SCRIPT = """
import signal, sys, threading
sys.path[:0] = {path!r}
import torch
from test_prepare_table import *
model, optimizer, loader = prepared()
def step(batch):
    one_step(model, optimizer, batch)
{body}
"""


def run_script(body):
    here = [str(each) for each in (Path(__file__).parent, *sys.path) if str(each)]
    text = SCRIPT.format(path=here, body=body)
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(("body", "code"), ENDS.values(), ids=ENDS)
def test_a_process_ends_as_it_says(body, code):
    done = run_script(body)
    assert done.returncode == code, done.stderr
    assert "Fatal" not in done.stderr
    assert "bagpipe" not in done.stderr.replace(str(__file__), "")


@pytest.mark.long
def test_a_process_that_holds_an_iterator_ends_cleanly_each_time():
    for _ in range(15):
        done = run_script("held = iter(loader); step(next(held)); print('end')")
        assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
