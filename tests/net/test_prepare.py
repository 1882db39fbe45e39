"""`bagpipe.prepare` promises: whatever people write, the result is that of plain PyTorch, to float tolerance; a
translated optimizer has the bits of the row optimizer that it stands for."""

from __future__ import annotations

import copy
import io
import random
from collections import namedtuple
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

import bagpipe
from harness.fake_kjt import KeyedJagged
from harness.plain import (
    ROWS,
    Net,
    assert_close,
    assert_same_bits,
    loss_fn,
    loss_of,
    make_batches,
    make_net,
    nothing_left,  # noqa: F401
    train_fast,
)
from harness.twice import (
    SMALL,
    adagrad,
    adam_and_sparse_adam,
    assert_equal_to_plain,
    epochs,
    listed,
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
one_epoch = partial(epochs, number=1)


def two_rates(model):
    return torch.optim.SGD([{"params": weights_of(model)[:1], "lr": 1.0}, {"params": weights_of(model)[1:]},
                            {"params": rest_of(model)}], lr=0.2)  # fmt: skip


def dense_first(model):
    return torch.optim.Adagrad([*rest_of(model), *weights_of(model)], lr=0.1)


def tables_only_in_sgd(model):
    return [torch.optim.AdamW(rest_of(model), lr=0.02), torch.optim.SGD(weights_of(model), lr=0.5)]


OPTIMIZERS = {
    "SGD": sgd,
    "SGD, a tensor as rate": lambda model: sgd(model, lr=torch.tensor(0.3), foreach=False),
    "Adagrad": adagrad,
    "Adagrad, its settings": partial(adagrad, lr_decay=0.1, initial_accumulator_value=0.3, eps=1e-3),
    "Adagrad, for each": partial(adagrad, foreach=False),
    "two rates": two_rates,
    "dense parameters first": dense_first,
    "AdamW for dense ones": tables_only_in_sgd,
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_of_torch_moves_rows_as_plain_pytorch_does(optimizer):
    assert_equal_to_plain(optimizer=optimizer)


@pytest.mark.parametrize("optimizer", [adam_and_sparse_adam, adagrad], ids=["SparseAdam", "Adagrad"])
def test_sparse_layers_are_trained_alike(optimizer):
    assert_equal_to_plain(model=sparse_net, optimizer=optimizer)


class Sometimes(Net):
    """A table is looked up in some batches only, and then a part of its ids."""

    calls = 0

    def forward(self, batch):
        self.calls += 1
        item = self.item(batch["item"][:, : 1 + self.calls % 3])
        user = self.user(batch["user"]) if self.calls % 2 else torch.zeros(len(item), 4)
        return self.top(torch.cat([user, item, batch["dense"]], 1)).squeeze(1)


@pytest.mark.parametrize(
    "optimizer", [sgd, partial(adagrad, lr_decay=0.5), adam_and_sparse_adam], ids=["SGD", "Adagrad", "SparseAdam"]
)
def test_rows_and_tables_that_no_layer_looks_up_stay(optimizer):
    assert_equal_to_plain(model=lambda: Sometimes(sparse=True), optimizer=optimizer)


def test_a_table_in_no_optimizer_stays():
    def optimizer(model):
        return torch.optim.SGD([model.user.weight, *model.top.parameters()], lr=0.3)

    assert_equal_to_plain(optimizer=optimizer, moved=False)


SCHEDULERS = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda number: 1 / (1 + number)),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.4, total_steps=20, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("optimizer", [adagrad, partial(sgd, lr=0.1)], ids=["Adagrad", "SGD"])
def test_a_scheduler_made_before_or_after_sets_the_rate_of_rows(make, optimizer, recwarn):
    def after(model, optimizer, loader, log):
        epochs(model, optimizer, loader, log, after_step=make(optimizer).step)

    def before(model):
        made = optimizer(model)
        made.scheduler = make(made)
        return made

    def with_it(model, optimizer, loader, log):
        epochs(model, optimizer, loader, log, after_step=optimizer.scheduler.step)

    assert_equal_to_plain(after, optimizer=optimizer)
    assert_equal_to_plain(with_it, optimizer=before)
    assert [str(each.message) for each in recwarn if "lr_scheduler" in str(each.message)] == []


def test_a_scheduler_of_sparse_adam_sets_its_betas():
    def script(model, optimizer, loader, log):
        scheduler = lr_scheduler.OneCycleLR(optimizer[1], 0.05, total_steps=20)
        epochs(model, optimizer, loader, log, after_step=scheduler.step)

    assert_equal_to_plain(script, model=sparse_net, optimizer=adam_and_sparse_adam)


def reduce_on_plateau(model, optimizer, loader, log):
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
    for _ in range(3):
        one_epoch(model, optimizer, loader, log)
        scheduler.step(1.0)


def rate_set_by_hand(model, optimizer, loader, log):
    for number in range(3):
        optimizer.param_groups[0]["lr"] = 0.3 / (1 + number)
        one_epoch(model, optimizer, loader, log)


def clipped_by_norm(model, optimizer, loader, log):
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        log.append(nn.utils.clip_grad_norm_(model.parameters(), 0.02).item())
        optimizer.step()


def clipped_by_value(model, optimizer, loader, log):
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()


def clipped_in_two_parts(model, optimizer, loader, log):
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        log.append(nn.utils.clip_grad_norm_(model.user.parameters(), 0.01).item())
        log.append(nn.utils.clip_grad_norm_(model.top.parameters(), 0.03).item())
        optimizer.step()


def scaled(model, optimizer, loader, log, unscale=False):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch) * (float("inf") if number == 4 else 1.0)).backward()
        if unscale:
            scaler.unscale_(optimizer)
            log.append(min(nn.utils.clip_grad_norm_(model.parameters(), 0.02).nan_to_num(9, 9).item(), 9.0))
        scaler.step(optimizer)
        scaler.update()
        log.append(scaler.get_scale())


def gradients_changed_in_place(model, optimizer, loader, log):
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        optimizer.step()


def gradients_read_between_backwards(model, optimizer, loader, log):
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        log.append(sum(parameter.grad.norm().item() ** 2 for parameter in model.parameters()))
        loss_of(model, batch).backward()
        optimizer.step()


def closure(model, optimizer, loader, log):
    for batch in loader:

        def both(batch=batch):
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            return loss

        log.append(optimizer.step(both).item())


def two_steps_a_batch(model, optimizer, loader, log):
    for batch in loader:
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()


def two_backwards_of_one_graph(model, optimizer, loader, log):
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward(retain_graph=True)
        (loss * 0.5).backward()
        optimizer.step()


def two_losses(model, optimizer, loader, log):
    for batch in loader:
        optimizer.zero_grad()
        out = model(batch)
        loss_fn(out, batch["label"]).backward(retain_graph=True)
        out.square().mean().backward()
        optimizer.step()


def every_second_batch_a_step(model, optimizer, loader, log):
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if number % 2:
            optimizer.step()


def some_batches_without_backward(model, optimizer, loader, log):
    for number, batch in enumerate(loader):
        if number % 3 == 1:
            continue
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def some_forwards_without_backward(model, optimizer, loader, log):
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        log.append(loss.item())
        if number % 3 == 1:
            optimizer.step()
            continue
        loss.backward()
        optimizer.step()


def frozen_in_turns(model, optimizer, loader, log):
    for number in range(4):
        model.user.weight.requires_grad_(number % 2 == 0)
        model.item.requires_grad_(number % 3 != 0)
        one_epoch(model, optimizer, loader, log)


def frozen_in_the_loop(model, optimizer, loader, log):
    for number, batch in enumerate(loader):
        model.user.weight.requires_grad = number % 2 == 0
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def zeroed_by(how):
    def script(model, optimizer, loader, log):
        for _ in range(2):
            for batch in loader:
                loss_of(model, batch).backward()
                optimizer.step()
                how(model, optimizer)

    return script


def zeroed_one_by_one(model, optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def zeroed_in_place(model, optimizer):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def zeroed_between_backwards(model, optimizer, loader, log, set_to_none=True):
    for batch in loader:
        optimizer.zero_grad()
        (loss_of(model, batch) * 3).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, batch).backward()
        optimizer.step()


def one_table_zeroed(model, optimizer, loader, log):
    """As in adversarial training: a part of the gradients is dropped."""
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        model.user.zero_grad()
        (loss_of(model, batch) * 0.5).backward()
        optimizer.step()


def dropped_before_the_step(model, optimizer, loader, log):
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if len(log) % 2:
            model.item.weight.grad = None
        optimizer.step()
        log.append(0.0)


def evaluated(inference):
    def script(model, optimizer, loader, log):
        valid = make_batches(2, seed=7)

        def evaluate():
            model.eval()
            with torch.inference_mode() if inference else torch.no_grad():
                log.extend(loss_of(model, batch).item() for batch in valid)
            model.train()

        evaluate()
        epochs(model, optimizer, loader, log, after_step=evaluate)
        evaluate()

    return script


def evaluated_between_forward_and_backward(model, optimizer, loader, log):
    valid = make_batches(2, seed=7)
    for batch in loader:
        loss = loss_of(model, batch)
        with torch.no_grad():
            log.append(loss_of(model, valid[0]).item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            log.append(loss_of(model, valid[1]).item())
            log.append(loss_of(model, batch).item())


def evaluated_with_gradients_outside(model, optimizer, loader, log):
    one_epoch(model, optimizer, loader, log)
    log.append(loss_of(model, make_batches(1, seed=7)[0]).item())
    one_epoch(model, optimizer, loader, log)


def states_read_in_the_loop(model, optimizer, loader, log):
    def read():
        log.append(model.state_dict()["user.weight"].sum().item())
        log.append(sum(float(torch.as_tensor(s.get("step", 0))) for s in optimizer.state_dict()["state"].values()))

    epochs(model, optimizer, loader, log, after_step=read)


def broken_off(model, optimizer, loader, log):
    for number in range(4):
        for place, batch in enumerate(loader):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            if place == 1 + number:
                break


def broken_off_without_step(model, optimizer, loader, log):
    for _ in range(3):
        for place, batch in enumerate(loader):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            if place == 2:
                break
            optimizer.step()


def an_exception_kept(model, optimizer, loader, log):
    kept = None
    for _ in range(2):
        try:
            for place, batch in enumerate(loader):
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
                if place == 3:
                    raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            kept = error
        with torch.no_grad():
            log.append(loss_of(model, make_batches(1, seed=5)[0]).item())
    assert kept is not None


def iterated_by_hand(model, optimizer, loader, log):
    batches = iter(loader)
    for _ in range(5):
        optimizer.zero_grad()
        loss_of(model, next(batches)).backward()
        optimizer.step()
    one_epoch(model, optimizer, loader, log)


def penalty_on_what_is_looked_up(model, optimizer, loader, log):
    for batch in loader:
        optimizer.zero_grad()
        user = model.user(batch["user"])
        (loss_of(model, batch) + 0.1 * user.square().mean()).backward()
        optimizer.step()


def gradient_penalty(model, optimizer, loader, log):
    for batch in loader:
        optimizer.zero_grad()
        dense = batch["dense"].clone().requires_grad_()
        loss = loss_of(model, batch | {"dense": dense})
        (slope,) = torch.autograd.grad(loss, dense, create_graph=True)
        (loss + slope.square().sum()).backward()
        optimizer.step()


def hook_on_what_is_looked_up(model, optimizer, loader, log):
    for batch in loader:
        optimizer.zero_grad()
        user = model.user(batch["user"]).mul_(2.0)
        user.register_hook(lambda grad: grad * 3)
        user.retain_grad()
        out = model.top(torch.cat([user, model.item(batch["item"]), batch["dense"]], 1)).squeeze(1)
        loss_fn(out, batch["label"]).backward()
        log.append(user.grad.sum().item())
        optimizer.step()


def gradient_penalty_on_rows(model, optimizer, loader, log):
    for batch in loader:
        optimizer.zero_grad()
        user = model.user(batch["user"])
        out = model.top(torch.cat([user, model.item(batch["item"]), batch["dense"]], 1)).tanh()
        (slope,) = torch.autograd.grad(out.sum(), user, create_graph=True)
        (out.square().mean() + slope.square().sum()).backward()
        optimizer.step()


def dense_inputs_only(model, optimizer, loader, log):
    one_epoch(model, optimizer, loader, log)
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward(inputs=list(model.top.parameters()))
        optimizer.step()


def hooks_on_outputs(model, optimizer, loader, log):
    handle = model.user.register_forward_hook(lambda module, given, output: output * 1.5)
    one_epoch(model, optimizer, loader, log)
    handle.remove()
    model.top[0].register_full_backward_hook(lambda module, given, out: (given[0] * 0.5,))
    one_epoch(model, optimizer, loader, log)


def hooks_of_steps(model, optimizer, loader, log):
    before = optimizer.register_step_pre_hook(lambda *_: log.append(1.0))
    optimizer.register_step_post_hook(lambda *_: log.append(2.0))
    one_epoch(model, optimizer, loader, log)
    before.remove()
    one_epoch(model, optimizer, loader, log)


def weights_loaded_between_epochs(model, optimizer, loader, log):
    first = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    one_epoch(model, optimizer, loader, log)
    model.load_state_dict(first)
    optimizer.load_state_dict(state) if not state["state"] else None
    one_epoch(model, optimizer, loader, log)


def state_of_the_optimizer_loaded_between_epochs(model, optimizer, loader, log):
    one_epoch(model, optimizer, loader, log)
    state = copy.deepcopy(optimizer.state_dict())
    one_epoch(model, optimizer, loader, log)
    optimizer.load_state_dict(state)
    one_epoch(model, optimizer, loader, log)


def moved_and_cast(model, optimizer, loader, log):
    model.to("cpu").float().train()
    log.append(float(sum(parameter.numel() for parameter in model.parameters())))
    epochs(model, optimizer, loader, log)


def averaged(model, optimizer, loader, log):
    """An average of the dense part, as people keep it."""
    average = copy.deepcopy(model.top)

    def update():
        for mean, now in zip(average.parameters(), model.top.parameters(), strict=True):
            mean.data.lerp_(now.data, 0.1)

    epochs(model, optimizer, loader, log, after_step=update)
    log.extend(parameter.sum().item() for parameter in average.parameters())


SCRIPTS = {
    "two epochs": epochs,
    "ReduceLROnPlateau": reduce_on_plateau,
    "a rate set by hand": rate_set_by_hand,
    "clipped by norm": clipped_by_norm,
    "clipped by value": clipped_by_value,
    "clipped in two parts": clipped_in_two_parts,
    "a scaler that skips a step": scaled,
    "a scaler, unscaled and clipped": partial(scaled, unscale=True),
    "gradients changed in place": gradients_changed_in_place,
    "gradients read between backwards": gradients_read_between_backwards,
    "a closure": closure,
    "two steps a batch": two_steps_a_batch,
    "two backwards of one graph": two_backwards_of_one_graph,
    "two losses": two_losses,
    "a step every second batch": every_second_batch_a_step,
    "batches without backward": some_batches_without_backward,
    "forwards without backward": some_forwards_without_backward,
    "frozen between epochs": frozen_in_turns,
    "frozen in the loop": frozen_in_the_loop,
    "zeroed by the optimizer": zeroed_by(lambda _, optimizer: optimizer.zero_grad()),
    "zeroed in place by the optimizer": zeroed_by(lambda _, optimizer: optimizer.zero_grad(set_to_none=False)),
    "zeroed by the model": zeroed_by(lambda model, _: model.zero_grad()),
    "zeroed in place by the model": zeroed_by(lambda model, _: model.zero_grad(set_to_none=False)),
    "zeroed one by one": zeroed_by(zeroed_one_by_one),
    "zeroed in place one by one": zeroed_by(zeroed_in_place),
    "zeroed between backwards": zeroed_between_backwards,
    "zeroed in place between backwards": partial(zeroed_between_backwards, set_to_none=False),
    "one table zeroed": one_table_zeroed,
    "a gradient dropped before the step": dropped_before_the_step,
    "evaluation": evaluated(inference=False),
    "evaluation in inference mode": evaluated(inference=True),
    "evaluation between forward and backward": evaluated_between_forward_and_backward,
    "evaluation with gradients outside of the loop": evaluated_with_gradients_outside,
    "states read in the loop": states_read_in_the_loop,
    "break and again": broken_off,
    "break without a step": broken_off_without_step,
    "an exception that is kept": an_exception_kept,
    "an iterator by hand": iterated_by_hand,
    "a penalty on what is looked up": penalty_on_what_is_looked_up,
    "a gradient penalty": gradient_penalty,
    "a hook on what is looked up": hook_on_what_is_looked_up,
    "a gradient penalty on what is looked up": gradient_penalty_on_rows,
    "gradients for dense parameters only": dense_inputs_only,
    "hooks on modules": hooks_on_outputs,
    "hooks on steps": hooks_of_steps,
    "weights loaded between epochs": weights_loaded_between_epochs,
    "an optimizer's state loaded between epochs": state_of_the_optimizer_loaded_between_epochs,
    "moved and cast": moved_and_cast,
    "an average of the dense part": averaged,
}


def zeroed_and_not_reached(model, optimizer, loader, log):
    for number, batch in enumerate(loader):
        for each in listed(optimizer):
            each.zero_grad(set_to_none=False)
        if number % 3:
            item = model.item(batch["item"])
            user = model.user(batch["user"]) if number % 2 else torch.zeros(len(item), 4)
            loss_fn(model.top(torch.cat([user, item, batch["dense"]], 1)).squeeze(1), batch["label"]).backward()
        for each in listed(optimizer):
            each.step()


@pytest.mark.parametrize("optimizer", [partial(adagrad, lr_decay=0.5), adam_and_sparse_adam])
def test_a_step_with_zeroed_gradients_counts(optimizer):
    assert_equal_to_plain(zeroed_and_not_reached, model=sparse_net, optimizer=optimizer)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
@pytest.mark.parametrize("optimizer", [sgd, adagrad], ids=["SGD", "Adagrad"])
def test_a_script_trains_as_in_plain_pytorch(script, optimizer):
    assert_equal_to_plain(script, optimizer=optimizer)


def accumulating(number, optimizer_first=False):
    def script(model, optimizer, loader, log):
        for _ in range(2):
            for place, batch in enumerate(loader):
                if optimizer_first and place % number == 0:
                    optimizer.zero_grad()
                (loss_of(model, batch) / number).backward()
                if (place + 1) % number == 0 or place == 7:
                    optimizer.step()
                    if not optimizer_first:
                        optimizer.zero_grad()

    return script


@pytest.mark.parametrize("number", [2, 3, 8, 20])
@pytest.mark.parametrize("zero_first", [False, True])
def test_announced_accumulation_is_one_step(number, zero_first):
    assert_equal_to_plain(accumulating(number, zero_first), accumulate=number, cache=60)


class Shared(nn.Module):
    """One layer for two features, and called twice."""

    def __init__(self):
        super().__init__()
        self.layer, self.top = nn.EmbeddingBag(30, 4, mode="mean"), nn.Linear(10, 1)

    def forward(self, batch):
        seen, wanted = self.layer(batch["user"]), self.layer(batch["item"])
        return self.top(torch.cat([seen * self.layer(batch["user"]), wanted, batch["dense"]], 1)).squeeze(1)


class Collected(nn.Module):
    """A dict and a list of layers."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleDict({name: nn.EmbeddingBag(rows, 4, mode="sum") for name, rows in ROWS.items()})
        self.more = nn.ModuleList([nn.Linear(10, 3), nn.Linear(3, 1)])

    def forward(self, batch):
        vectors = [table(batch[name]) for name, table in self.tables.items()]
        return self.more[1](self.more[0](torch.cat([*vectors, batch["dense"]], 1)).relu()).squeeze(1)


class Factors(nn.Module):
    """One feature feeds two layers, whose vectors lie in one row."""

    def __init__(self):
        super().__init__()
        self.wide, self.deep = nn.EmbeddingBag(30, 1, mode="sum"), nn.EmbeddingBag(30, 4, mode="sum")
        self.item, self.top = nn.Embedding(20, 4, padding_idx=1), nn.Linear(6, 1)

    def forward(self, batch):
        vectors = torch.cat([self.deep(batch["user"]) * self.item(batch["item"]).mean(1), batch["dense"]], 1)
        return (self.wide(batch["user"]) + self.top(vectors)).squeeze(1)


class Sequences(nn.Module):
    """Positions of ids, a mask of them, and a computed subset."""

    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(30, 4), nn.Embedding(20, 4, padding_idx=0)
        self.cell, self.top = nn.GRU(4, 4, batch_first=True), nn.Linear(10, 1)

    def forward(self, batch):
        mask = (batch["item"] != 0).unsqueeze(-1)
        items = self.item(torch.where(mask.squeeze(-1), batch["item"], 0)) * mask
        hidden = self.cell(items)[1][0]
        return self.top(torch.cat([self.user(batch["user"][:, 0].clone()), hidden, batch["dense"]], 1)).squeeze(1)


class Weighted(Net):
    """Each id counts as a tensor of the batch says."""

    def forward(self, batch):
        weights = batch["dense"].repeat(1, 2)[:, :3].contiguous()
        vectors = [self.user(batch["user"]), self.item(batch["item"], per_sample_weights=weights), batch["dense"]]
        return self.top(torch.cat(vectors, 1)).squeeze(1)


class WithOffsets(Net):
    """Bags in one dimension."""

    def forward(self, batch):
        offsets = torch.arange(0, batch["item"].numel() + 1, 3)
        if not self.item.include_last_offset:
            offsets = offsets[:-1]
        item = self.item(batch["item"].reshape(-1), offsets)
        return self.top(torch.cat([self.user(batch["user"]), item, batch["dense"]], 1)).squeeze(1)


class Half(Net):
    """Autocast over everything."""

    def forward(self, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            return super().forward(batch)


class Checkpointed(Net):
    """The forward pass of a part is done again in the backward pass."""

    def forward(self, batch):
        vectors = torch.cat([self.user(batch["user"]), self.item(batch["item"]), batch["dense"]], 1)
        return torch.utils.checkpoint.checkpoint(self.top, vectors, use_reentrant=False).squeeze(1)


class LookUpsCheckpointed(Net):
    """The look-ups too."""

    def forward(self, batch):
        return torch.utils.checkpoint.checkpoint(super().forward, batch, use_reentrant=False)


class Detached(Net):
    """A table is looked up twice, once without a gradient."""

    def forward(self, batch):
        user = self.user(batch["user"])
        with torch.no_grad():
            target = self.user(batch["user"]).square()
        return self.top(torch.cat([user - target, self.item(batch["item"]), batch["dense"]], 1)).squeeze(1)


class Tied(Net):
    """A part of the model is in it under two names."""

    def __init__(self):
        super().__init__()
        self.again = self.user


class Copied(Net):
    """Ids go through buffers, lists, other types and NumPy."""

    def forward(self, batch):
        user = torch.zeros(len(batch["user"]), 1, dtype=torch.long)
        user.copy_(batch["user"])
        item = torch.from_numpy(batch["item"].int().numpy().copy())
        return super().forward({"user": torch.tensor(user.tolist()), "item": item, "dense": batch["dense"]})


class Narrow(Net):
    """Slices and transposes of ids, flipped."""

    def forward(self, batch):
        item = batch["item"].T.contiguous().T.flip(1)[:, [2, 0, 1]]
        return super().forward(batch | {"item": item})


def seeded(kind, *given, **options):
    def make():
        torch.manual_seed(3)
        return kind(*given, **options)

    return make


def item_frozen():
    net = make_net()
    net.item.weight.requires_grad_(False)
    return net


MODELS = {
    "a layer for two features, called twice": (seeded(Shared), {"features": {"user": "layer", "item": "layer"}}),
    "layers in a dict": (seeded(Collected), {}),
    "a feature for two layers": (seeded(Factors), {"features": {"user": ["wide", "deep"], "item": "item"}}),
    "sequences and masks": (seeded(Sequences), {}),
    "weights of ids": (seeded(Weighted), {}),
    "offsets": (seeded(WithOffsets, mode="mean"), {}),
    "the last offset too": (seeded(WithOffsets, mode="mean", include_last_offset=True), {}),
    "padding": (seeded(Net, mode="mean", padding_idx=0), {}),
    "different widths": (seeded(Net, dims=(3, 7)), {}),
    "no autocast": (seeded(Half), {}),
    "a checkpointed part": (seeded(Checkpointed), {}),
    "look-ups that are checkpointed": (seeded(LookUpsCheckpointed), {}),
    "a look-up without gradient": (seeded(Detached), {}),
    "a layer of two names": (seeded(Tied), {}),
    "ids that are copied": (seeded(Copied), {}),
    "ids that are turned round": (seeded(Narrow), {}),
}


@pytest.mark.parametrize(("model", "options"), MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("optimizer", [sgd, adagrad], ids=["SGD", "Adagrad"])
def test_a_model_trains_as_in_plain_pytorch(model, options, optimizer):
    assert_equal_to_plain(model=model, optimizer=optimizer, **options)


def test_a_layer_frozen_from_the_beginning_stays():
    assert_equal_to_plain(model=item_frozen, moved=False)


def test_a_layer_that_is_kept_is_trained_by_torch():
    assert_equal_to_plain(options=bagpipe.Options(keep=["user"]))


Named = namedtuple("Named", ["user", "item", "dense", "label"])


@dataclass(frozen=True)
class Record:
    user: torch.Tensor
    item: torch.Tensor
    dense: torch.Tensor
    label: torch.Tensor


class ByAttribute(Net):
    def forward(self, batch):
        return super().forward({"user": batch.user, "item": batch.item, "dense": batch.dense})


class ByKey(Net):
    """A KeyedJaggedTensor, key by key."""

    def forward(self, batch):
        parts = {name: batch[0][name] for name in ROWS}
        vectors = [
            getattr(self, name)(part.values(), part.offsets()[:-1], part.weights_or_none())
            for name, part in parts.items()
        ]
        return self.top(torch.cat([*vectors, batch[1]], 1)).squeeze(1)


def keyed(weighted):
    numbers = np.random.default_rng(3)

    def one(batch):
        lengths = torch.from_numpy(numbers.integers(0, 4, 12))
        user, item = int(lengths[:6].sum()), int(lengths[6:].sum())
        values = torch.from_numpy(np.concatenate([numbers.integers(0, 30, user), numbers.integers(0, 20, item)]))
        weights = torch.rand(len(values), generator=torch.Generator().manual_seed(1)) if weighted else None
        return KeyedJagged(["user", "item"], values, weights, lengths), batch["dense"], batch["label"]

    return [one(batch) for batch in make_batches()]


def of_attributes(model, batch):
    return loss_fn(model(batch), batch.label)


def of_last(model, batch):
    return loss_fn(model(batch), batch[-1])


class ByPlace(Net):
    def forward(self, batch):
        return super().forward({"user": batch[0], "item": batch[1], "dense": batch[2]})


BATCHES = {
    "named tuples": (ByAttribute, lambda: [Named(**each) for each in make_batches()], of_attributes, {}),
    "data classes": (ByAttribute, lambda: [Record(**each) for each in make_batches()], of_attributes, {}),
    "tuples": (ByPlace, lambda: [tuple(each.values()) for each in make_batches()], of_last,
               {"features": {"0": "user", "1": "item"}}),
    "lists": (ByPlace, lambda: [list(each.values()) for each in make_batches()], of_last,
              {"features": {"0": "user", "1": "item"}}),
    "32 bits": (Net, lambda: [each | {"item": each["item"].int(), "user": each["user"].int()}
                              for each in make_batches()], loss_of, {}),
    "keyed and jagged": (ByKey, partial(keyed, False), of_last, {"features": {"user": "user", "item": "item"}}),
    "keyed, jagged, weighted": (ByKey, partial(keyed, True), of_last, {"features": {"user": "user", "item": "item"}}),
}  # fmt: skip


@pytest.mark.parametrize(("model", "loader", "loss", "options"), BATCHES.values(), ids=BATCHES)
def test_batches_of_a_kind_stay_what_they_are(model, loader, loss, options):
    assert_equal_to_plain(partial(epochs, loss_of=loss), model=seeded(model), loader=loader, **options)


def samples(number=50):
    whole = make_batches(1, size=number)[0]
    return [{name: values[place] for name, values in whole.items()} for place in range(number)]


class Stream(IterableDataset):
    def __iter__(self):
        yield from samples(30)


class Shuffling(IterableDataset):
    def __iter__(self):
        of_all = samples(30)
        yield from (of_all[place] for place in torch.randperm(30))


class ByEpoch(Sampler):
    """As DistributedSampler: the order is that of the epoch that was set."""

    epoch = 0

    def __iter__(self):
        return iter(np.random.default_rng(self.epoch).permutation(50).tolist())

    def __len__(self):
        return 50

    def set_epoch(self, epoch):
        self.epoch = epoch


class Augmented(torch.utils.data.Dataset):
    """Draws from a generator for every sample."""

    def __len__(self):
        return 50

    def __getitem__(self, place):
        sample = dict(samples()[place])
        return sample | {"dense": sample["dense"] + torch.randn(2) * 0.1}


class Shrinking:
    """Each epoch has fewer batches, and the last none."""

    def __init__(self):
        self.left = 4

    def __iter__(self):
        self.left -= 1
        return iter(make_batches(self.left))


def each_with_epoch_set(model, optimizer, loader, log):
    for number in range(3):
        loader.sampler.set_epoch(number)
        one_epoch(model, optimizer, loader, log)


class Counting:
    """Shuffles its own order by a generator of its own, and counts its epochs."""

    def __init__(self):
        self.order, self.indices, self.epoch = make_batches(), np.arange(8), 0
        self.random, self.more, self.python = np.random.default_rng(1), torch.Generator(), random.Random(1)

    def __iter__(self):
        self.epoch += 1
        self.python.shuffle(self.order)
        self.random.shuffle(self.indices)
        for place in torch.randperm(8, generator=self.more).tolist():
            batch = self.order[self.indices[place]]
            yield batch | {"dense": batch["dense"] + 0.1 * self.epoch}


class DrawsItself(torch.utils.data.Dataset):
    """Has a generator of its own for every sample."""

    def __init__(self):
        self.random = np.random.default_rng(1)

    def __len__(self):
        return 50

    def __getitem__(self, place):
        sample = dict(samples()[place])
        return sample | {"dense": sample["dense"] + float(self.random.random())}


class Dropout(Net):
    def forward(self, batch):
        return nn.functional.dropout(super().forward(batch), 0.3)


of_samples = partial(DataLoader, batch_size=8)
LOADERS = {
    "a DataLoader": lambda: of_samples(samples()),
    "the last batch dropped": lambda: of_samples(samples(), drop_last=True),
    "shuffled": lambda: of_samples(samples(), shuffle=True),
    "shuffled by a generator": lambda: of_samples(samples(), shuffle=True, generator=torch.Generator().manual_seed(5)),
    "a worker": lambda: of_samples(samples(), shuffle=True, num_workers=1),
    "a worker and a generator": lambda: of_samples(
        samples(), shuffle=True, num_workers=1, generator=torch.Generator().manual_seed(5)
    ),
    "persistent workers": lambda: of_samples(samples(), shuffle=True, num_workers=2, persistent_workers=True),
    "a stream": lambda: of_samples(Stream()),
    "a stream and a worker": lambda: of_samples(Stream(), num_workers=1),
    "a stream that shuffles": lambda: of_samples(Shuffling()),
    "batches of a sampler": lambda: DataLoader(samples(), batch_sampler=BatchSampler(range(49, 0, -1), 8, False)),
    "batched by the data set": lambda: DataLoader(make_batches(), batch_size=None),
    "batched by the data set, shuffled": lambda: DataLoader(make_batches(), batch_size=None, shuffle=True),
    "a random number a sample": lambda: of_samples(Augmented()),
    "one batch": lambda: make_batches(1),
    "a tuple of batches": lambda: tuple(make_batches()),
    "batches of one sample": lambda: make_batches(4, size=1),
    "fewer batches each time": Shrinking,
    "an order of its own": Counting,
    "a data set with a generator of its own": lambda: of_samples(DrawsItself()),
}


class Noisy(torch.utils.data.Dataset):
    """Augments what it reads."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        torch.rand(1)
        batch = make_batches()[0]
        return {name: batch[name][index % len(batch[name])] for name in batch}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_draws_from_the_generator_of_the_model_is_warned_of(workers):
    model = make_net()
    loader = DataLoader(Noisy(), batch_size=6, num_workers=workers)
    if workers:
        bagpipe.prepare(model, sgd(model), loader, **SMALL)
        return
    with pytest.warns(UserWarning, match="draws from torch's global random generator.*num_workers=1"):
        bagpipe.prepare(model, sgd(model), loader, **SMALL)


@pytest.mark.filterwarnings("ignore:the loader draws")  # the model of this test does not
@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
def test_a_loader_gives_what_it_would_give_without_us(loader):
    assert_equal_to_plain(partial(epochs, number=3), model=seeded(Net), loader=loader, moved=False)


@pytest.mark.parametrize("name", ["shuffled by a generator", "a worker", "persistent workers", "a DataLoader"])
def test_random_numbers_of_the_model_are_those_of_plain_pytorch(name):
    assert_equal_to_plain(partial(epochs, number=3), model=seeded(Dropout), loader=LOADERS[name])


def test_a_sampler_hears_of_its_epoch():
    assert_equal_to_plain(each_with_epoch_set, loader=lambda: of_samples(samples(), sampler=ByEpoch()))


@pytest.mark.parametrize(
    "name", ["shuffled", "shuffled by a generator", "a worker and a generator", "an order of its own"]
)
def test_a_shuffled_loader_can_be_broken_off(name):
    """What was read ahead has drawn nothing, once it is dropped."""
    assert_equal_to_plain(broken_off, model=seeded(Net), loader=LOADERS[name])


def test_a_generator_is_one_epoch():
    assert_equal_to_plain(one_epoch, loader=lambda: (batch for batch in make_batches()))


@pytest.mark.filterwarnings("ignore")  # those of the compiler itself
def test_a_compiled_model_is_the_same_model():
    def compiled():
        return torch.compile(make_net(), backend="eager")

    def script(model, optimizer, loader, log):
        epochs(torch.compile(model, backend="eager"), optimizer, loader, log)

    assert_equal_to_plain(script)
    assert_equal_to_plain(model=compiled)


def test_a_loader_that_reads_ahead_inside_changes_nothing():
    class Ahead:
        def __init__(self, loader):
            self.loader = loader

        def __iter__(self):
            batches = iter(self.loader)
            current = next(batches)
            for following in batches:
                yield current
                current = following
            yield current

    assert_equal_to_plain(loader=lambda: Ahead(make_batches()))


def test_tables_on_the_meta_device_have_the_weights_that_they_say():
    def script(model, optimizer, loader, log):
        first = model.state_dict()
        plain = Net()
        plain.load_state_dict(first)
        epochs(model, optimizer, loader, [])
        epochs(plain, adagrad(plain), make_batches(), [])
        assert_close(plain.state_dict(), model.state_dict())

    def model():
        net = make_net()
        net.user = nn.EmbeddingBag(30, 4, mode="sum", device="meta")
        net.item = nn.EmbeddingBag(20, 4, mode="sum", device="meta")
        return net

    run(script, True, model=model)


def as_pairs(optimizer):
    return lambda model: [optimizer(model.top.parameters()), torch.optim.SparseAdam(weights_of(model), lr=0.05)]


TRANSLATED = {
    "SGD": (lambda m: sgd(m, lr=0.1), bagpipe.optim.SGD(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "Adagrad": (adagrad, bagpipe.optim.Adagrad(0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
    "SparseAdam": (as_pairs(lambda p: torch.optim.Adam(p, lr=0.02)), bagpipe.optim.Adam(0.05),
                   lambda p: torch.optim.Adam(p, lr=0.02)),
}  # fmt: skip


@pytest.mark.parametrize(("optimizer", "rows", "dense"), TRANSLATED.values(), ids=TRANSLATED)
def test_translated_optimizers_end_with_the_bits_of_rows(optimizer, rows, dense):
    expected = train_fast(make_net(), make_batches(), rows, dense)
    assert_same_bits(expected, run(one_epoch, True, optimizer=optimizer).weights)


@pytest.mark.parametrize("cache", [60, "100%", bagpipe.Cache(60, lookahead=1), bagpipe.Cache("2MB", policy="lru")])
@pytest.mark.parametrize("store", ["memory", bagpipe.Files(memory="5MB")], ids=["memory", "files"])
def test_cache_and_store_change_no_bit(cache, store):
    expected, found = run(epochs, True), run(epochs, True, cache=cache, store=store)
    assert_same_bits(expected.weights, found.weights)
    assert expected.log == found.log


def test_rows_by_table_have_a_group_for_each_optimizer():
    rows = bagpipe.optim.PerTable(bagpipe.optim.SGD(0.1), {"item": bagpipe.optim.Adagrad(0.2)})

    def script(model, optimizer, loader, log):
        assert [group["lr"] for group in optimizer.param_groups[1:]] == [0.1, 0.2]
        one_epoch(model, optimizer, loader, log)

    found = run(script, True, rows=rows)
    model = make_net()
    optimizers = [
        torch.optim.SGD([model.user.weight], lr=0.1),
        torch.optim.Adagrad([model.item.weight], lr=0.2),
        torch.optim.Adagrad(rest_of(model), lr=0.1),
    ]
    one_epoch(model, optimizers, make_batches(), [])
    assert_close(model.state_dict(), found.weights)


def test_a_scheduler_sets_the_rate_of_rows_that_are_given():
    def script(model, optimizer, loader, log):
        scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
        epochs(model, optimizer, loader, log, after_step=scheduler.step)

    found = run(script, True, optimizer=sgd, rows=bagpipe.optim.Adagrad(0.3))
    torch.manual_seed(1)
    model = make_net()
    both = [torch.optim.SGD(rest_of(model), lr=0.3), torch.optim.Adagrad(weights_of(model), lr=0.3)]
    schedulers = [lr_scheduler.StepLR(each, 1, 0.5) for each in both]
    epochs(model, both, make_batches(), [], after_step=lambda: [each.step() for each in schedulers])
    assert_close(model.state_dict(), found.weights)


@pytest.mark.parametrize(
    ("model", "optimizer"), [(make_net, adagrad), (sparse_net, adam_and_sparse_adam)], ids=["Adagrad", "SparseAdam"]
)
def test_saved_states_go_on_in_both(model, optimizer):
    """In plain PyTorch and prepared, each from the other's file."""

    def saved(prepared):
        torch.manual_seed(1)
        made, loader = model(), make_batches()
        optimizers = optimizer(made)
        if prepared:
            made, optimizers, loader = bagpipe.prepare(made, optimizers, loader, **SMALL)
        epochs(made, optimizers, loader, [])
        file = io.BytesIO()
        torch.save([made.state_dict(), [each.state_dict() for each in listed(optimizers)]], file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def gone_on(prepared, weights, states):
        torch.manual_seed(9)
        made, loader = model(), make_batches(seed=4)
        optimizers = optimizer(made)
        if prepared:
            made, optimizers, loader = bagpipe.prepare(made, optimizers, loader, **SMALL)
        made.load_state_dict(weights)
        for each, state in zip(listed(optimizers), states, strict=True):
            each.load_state_dict(state)
        epochs(made, optimizers, loader, [])
        return {name: value.clone() for name, value in made.state_dict().items()}

    expected = gone_on(False, *saved(False))
    for before, after in [(False, True), (True, False), (True, True)]:
        assert_close(expected, gone_on(after, *saved(before)))


@pytest.mark.parametrize("lr", [0.05, bagpipe.schedules.Cosine(0.05, 12)], ids=["a rate", "a schedule"])
def test_rows_that_are_given_go_on_from_their_state(lr):
    def script(rows, number):
        def trained(model, optimizer, loader, log):
            epochs(model, optimizer, loader, log, number=number)

        return run(trained, True, rows=rows)

    whole = script(bagpipe.optim.AdamW(lr), 2)
    half = script(bagpipe.optim.AdamW(lr), 1)

    def go_on(model, optimizer, loader, log):
        model.load_state_dict(half.weights)
        optimizer.load_state_dict(half.states[0])
        one_epoch(model, optimizer, loader, log)

    assert_same_bits(whole.weights, run(go_on, True, rows=bagpipe.optim.AdamW(lr)).weights)


def test_what_is_exported_is_what_state_dict_says(tmp_path):
    from safetensors.torch import load_file

    found = run(epochs, True)
    bagpipe.export(found.model, tmp_path / "model.safetensors")
    assert_same_bits(
        dict(sorted(found.weights.items())), dict(sorted(load_file(tmp_path / "model.safetensors").items()))
    )


def test_model_and_optimizer_stay_the_objects_that_they_are():
    model = make_net()
    optimizer = adagrad(model)
    shapes = [(name, parameter.shape) for name, parameter in model.named_parameters()]
    prepared, same, loader = bagpipe.prepare(model, optimizer, make_batches(), **SMALL)
    assert prepared is model
    assert same is optimizer
    assert isinstance(optimizer, torch.optim.Adagrad)
    assert type(optimizer).__name__ == "Adagrad"
    assert [(name, parameter.shape) for name, parameter in model.named_parameters()] == shapes
    assert next(each for each in optimizer.param_groups[0]["params"]) is model.user.weight
    assert len(loader) == 8
    assert repr(model.user.weight) == "RowParameter('user', (30, 4))"
    assert "EmbeddingBag" not in type(model.user).__name__
    assert "cached" in repr(model)


def test_attributes_of_the_loader_are_there():
    loader = of_samples(samples(), shuffle=True)
    model = make_net()
    _, _, prepared = bagpipe.prepare(model, adagrad(model), loader, **SMALL)
    assert prepared.dataset is loader.dataset
    assert prepared.batch_size == 8
    assert len(prepared) == 7
    with pytest.raises(TypeError):
        len(bagpipe.prepare(net := make_net(), adagrad(net), iter(make_batches()), **SMALL)[2])


def test_other_optimizers_of_the_class_stay_as_they_are():
    class_step = torch.optim.Adagrad.step
    model, other = make_net(), nn.Linear(2, 1)
    _, optimizer, loader = bagpipe.prepare(model, adagrad(model), make_batches(), **SMALL)
    second = make_net()
    _, of_second, more = bagpipe.prepare(second, adagrad(second), make_batches(), **SMALL)
    plain = torch.optim.Adagrad(other.parameters(), lr=0.1)
    assert type(plain) is torch.optim.Adagrad is not type(optimizer)
    assert torch.optim.Adagrad.step is class_step
    epochs(model, optimizer, loader, [])
    before = other.weight.clone()
    other(torch.ones(1, 2)).sum().backward()
    plain.step()
    assert not torch.equal(before, other.weight)
    assert torch.equal(second.state_dict()["user.weight"], make_net().state_dict()["user.weight"])
    epochs(second, of_second, more, [])
    assert_same_bits(model.state_dict(), second.state_dict())


def test_two_models_are_trained_in_turns():
    """Each in the other's loop."""

    def script(model, optimizer, loader, log):
        torch.manual_seed(2)
        second = Net()
        of_second, batches = sgd(second), make_batches(seed=3)
        if not isinstance(loader, list):
            second, of_second, batches = bagpipe.prepare(second, of_second, batches, **SMALL)
        for one, two in zip(loader, batches, strict=True):
            for net, rows, batch in [(model, optimizer, one), (second, of_second, two)]:
                rows.zero_grad()
                loss_of(net, batch).backward()
                rows.step()
        log.extend(value.sum().item() for value in second.state_dict().values())

    assert_equal_to_plain(script)


def test_a_group_of_dense_parameters_can_be_added():
    def script(model, optimizer, loader, log):
        model.scale = nn.Parameter(torch.ones(1))
        optimizer.add_param_group({"params": [model.scale], "lr": 0.5})

        def scaled_loss(model, batch):
            return loss_fn(model(batch) * model.scale, batch["label"])

        epochs(model, optimizer, loader, log, loss_of=scaled_loss)
        log.append(model.scale.item())
        del model.scale

    assert_equal_to_plain(script)
