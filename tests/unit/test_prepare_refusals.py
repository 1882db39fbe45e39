"""`bagpipe.prepare` refuses what it can't do exactly, by name and with a remedy, and changes nothing by that."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import bagpipe
from bagpipe.errors import BagpipeError, BatchError, ConfigError, GradientError, ModelError
from harness.plain import Net, loss_of, make_batches, make_net, nothing_left, sgd  # noqa: F401
from harness.started import assert_untouched
from harness.twice import SMALL, adagrad, epochs, refuses, rest_of, run, sparse_net, weights_of

pytestmark = pytest.mark.usefixtures("nothing_left")


class Wrapper(torch.optim.Optimizer):
    """As HF's AcceleratedOptimizer, of an unknown class around one of torch's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.state, self.defaults = optimizer.state, optimizer.defaults

    param_groups = property(lambda self: self.optimizer.param_groups)


def trained(model):
    optimizer = adagrad(model)
    epochs(model, optimizer, make_batches(), [])
    return optimizer


def with_own_step(model):
    optimizer = adagrad(model)
    optimizer.step = lambda: None
    return optimizer


def with_scheduler(model):
    optimizer = adagrad(model)
    lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def of_two(model):
    user, item = weights_of(model)
    return [torch.optim.SGD([user, *rest_of(model)], lr=0.1), torch.optim.SGD([item], lr=0.1)]


def of_torch(kind, **settings):
    return lambda model: kind(model.parameters(), lr=0.1, **settings)


OPTIMIZERS = {
    "momentum": (of_torch(torch.optim.SGD, momentum=0.9), {}, "momentum=0.9.*bagpipe.optim.Momentum"),
    "weight decay": (of_torch(torch.optim.Adagrad, weight_decay=0.1), {}, "weight_decay=0.1.*AdamW"),
    "maximize": (of_torch(torch.optim.SGD, maximize=True), {}, "maximize=True"),
    "Adam": (of_torch(torch.optim.Adam), {}, "in a Adam: it moves rows.*bagpipe.optim.Adam"),
    "AdamW": (of_torch(torch.optim.AdamW), {}, "bagpipe.optim.AdamW"),
    "RMSprop": (of_torch(torch.optim.RMSprop), {}, "in a RMSprop"),
    "LBFGS": (of_torch(torch.optim.LBFGS), {}, "LBFGS makes several passes"),
    "a wrapper": (lambda model: Wrapper(adagrad(model)), {}, "in a Wrapper.*prepare that one first"),
    "trained before": (trained, {}, "trained by this optimizer already"),
    "a step of its own": (with_own_step, {}, "step of this Adagrad was replaced"),
    "two optimizers of rows": (of_two, {}, "in two optimizers: put them all into one"),
    "no optimizer": (lambda _: [], {}, "no optimizer is given"),
    "not an optimizer": (lambda _: "Adam", {}, "a str: give one of torch.optim"),
    "a scheduler before rows=": (with_scheduler, {"rows": bagpipe.optim.Adam(0.1)}, "build schedulers after"),
    "rows= of torch": (adagrad, {"rows": torch.optim.Adam}, "rows is a type: give one of bagpipe.optim"),
    "an eps of nothing": (partial(adagrad, eps=0.0), {}, "eps is 0.0"),
    "too small a cache": (adagrad, {"cache": 1}, "cache"),
    "a wrong unit": (adagrad, {"cache": "2 parsecs"}, "parsecs"),
    "an unknown policy": (adagrad, {"cache": bagpipe.Cache(60, policy="best")}, "best"),
    "an unknown feature": (adagrad, {"features": {"usr": "user"}}, "usr"),
    "an unknown layer": (adagrad, {"features": {"user": "usr", "item": "item"}}, "usr"),
    "accumulate=0": (adagrad, {"accumulate": 0}, "accumulate"),
}


@pytest.mark.parametrize(("make", "options", "words"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_what_is_refused_at_once_is_named_and_changes_nothing(make, options, words):
    model, loader = make_net(), make_batches()
    optimizer = make(model)
    before = copy.deepcopy(model.state_dict())
    several = [each for each in (optimizer if isinstance(optimizer, list) else [optimizer]) if each != "Adam"]
    kinds = [type(each) for each in several]
    groups = [[(list(map(id, group["params"])), group["lr"]) for group in each.param_groups] for each in several]
    with pytest.raises(BagpipeError, match=words):
        bagpipe.prepare(model, optimizer, loader, **SMALL | options)
    assert_untouched(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [type(each) for each in several] == kinds
    assert groups == [[(list(map(id, g["params"])), g["lr"]) for g in each.param_groups] for each in several]
    assert len(loader) == 8
    assert all(isinstance(part, nn.EmbeddingBag) for part in (model.user, model.item))
    assert all(parameter.grad is None or parameter.is_leaf for parameter in model.parameters())
    bagpipe.prepare(model, adagrad(model), loader, **SMALL)  # nothing of it stands in the way


LAYERS = {
    "max_norm": (nn.EmbeddingBag(30, 4, max_norm=1.0, mode="sum"), "max_norm"),
    "scale_grad_by_freq": (nn.EmbeddingBag(30, 4, scale_grad_by_freq=True, mode="sum"), "scale_grad_by_freq"),
    "the largest of a bag": (nn.EmbeddingBag(30, 4, mode="max"), "max"),
    "other numbers": (nn.EmbeddingBag(30, 4, mode="sum", dtype=torch.float64), "float64"),
}


@pytest.mark.parametrize(("layer", "words"), LAYERS.values(), ids=LAYERS)
def test_a_layer_that_can_not_be_exact_is_refused(layer, words):
    model = make_net()
    model.user = layer
    optimizer = adagrad(model)
    with pytest.raises(ModelError, match=words):
        bagpipe.prepare(model, optimizer, make_batches(), **SMALL)
    assert model.user is layer
    assert type(optimizer) is torch.optim.Adagrad


def test_tied_weights_are_refused():
    model = make_net(dims=(4, 4))
    model.more = nn.Linear(4, 30)
    model.more.weight = model.user.weight
    with pytest.raises(ModelError, match="user"):
        bagpipe.prepare(model, adagrad(model), make_batches(), **SMALL)
    assert_untouched(model)


def test_layers_that_share_rows_must_share_a_group():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.deep = nn.EmbeddingBag(30, 1), nn.EmbeddingBag(30, 4)

    model = Wide()
    optimizer = torch.optim.SGD([{"params": [model.wide.weight]}, {"params": [model.deep.weight]}], lr=0.1)
    with pytest.raises(ConfigError, match="several param groups: put them into one"):
        bagpipe.prepare(model, optimizer, make_batches(), cache=60, features={"user": ["wide", "deep"]})
    assert_untouched(model)


@pytest.mark.parametrize("what", ["model and optimizer", "model"])
def test_what_was_prepared_is_not_prepared_again(what):
    model = make_net()
    _, optimizer, loader = bagpipe.prepare(model, adagrad(model), make_batches(), **SMALL)
    again = optimizer if what == "model and optimizer" else sgd(model.parameters())
    with pytest.raises(BagpipeError, match="prepared already"):
        bagpipe.prepare(model, again, loader, **SMALL)


def test_a_loader_that_gives_nothing_or_is_none_is_refused():
    for loader, words in [([], "empty"), (3, "a int: give something that yields")]:
        model = make_net()
        with pytest.raises(BatchError, match=words):
            bagpipe.prepare(model, adagrad(model), loader, **SMALL)
        assert_untouched(model)


def each_batch(*actions, zero=True):
    """A loop of these, with the loss of the batch where one asks for it."""

    def script(model, optimizer, loader, log):
        for batch in loader:
            if zero:
                optimizer.zero_grad()
            for action in actions:
                action(model, optimizer, loader, batch)

    return script


def backward(model, optimizer, loader, batch):
    loss_of(model, batch).backward()


def step(model, optimizer, loader, batch):
    optimizer.step()


def zero(model, optimizer, loader, batch):
    optimizer.zero_grad()


def clip(model, optimizer, loader, batch):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def zero_in_place(model, optimizer, loader, batch):
    model.user.zero_grad(set_to_none=False)


def not_finite(model, optimizer, loader, batch):
    (loss_of(model, batch) * float("nan")).backward()


def dense_not_finite(model, optimizer, loader, batch):
    model.top[2].bias.grad.fill_(float("inf"))


def other_ids(model, optimizer, loader, batch):
    loss_of(model, make_batches(1, seed=9)[0] | {"user": torch.arange(30)[:6, None] + 24}).backward()


def penalty(model, optimizer, loader, batch):
    sum(parameter.pow(2).sum() for parameter in model.parameters()).backward()


def set_gradient(model, optimizer, loader, batch):
    model.user.weight.grad = torch.ones(30, 4)


def momentum(model, optimizer, loader, batch):
    optimizer.param_groups[0]["momentum"] = 0.95


def load(model, optimizer, loader, batch):
    optimizer.load_state_dict(optimizer.state_dict())


def load_weights(model, optimizer, loader, batch):
    model.load_state_dict(model.state_dict())


def copy_model(model, optimizer, loader, batch):
    copy.deepcopy(model)


def pickle_weight(model, optimizer, loader, batch):
    pickle.dumps(model.user.weight)


def copy_optimizer(model, optimizer, loader, batch):
    copy.deepcopy(optimizer)


def second_iteration(model, optimizer, loader, batch):
    next(iter(loader))


def read_weight(model, optimizer, loader, batch):
    model.user.weight.norm()


def read_data(model, optimizer, loader, batch):
    model.user.weight.data.mul_(0.5)


def replace_weight(model, optimizer, loader, batch):
    model.user.weight = nn.Parameter(torch.zeros(30, 4))


def hook_weight(model, optimizer, loader, batch):
    model.user.weight.register_hook(lambda grad: grad * 2)


def change_ids(model, optimizer, loader, batch):
    batch["user"].add_(1).remainder_(30)
    model(batch)


def by_function(model, optimizer, loader, batch):
    nn.functional.embedding(batch["user"], model.user.weight)


def by_autograd(model, optimizer, loader, batch):
    torch.autograd.grad(loss_of(model, batch), list(model.parameters()))


def score_all(model, optimizer, loader, batch):
    nn.functional.linear(model.user(batch["user"]), model.item.weight)


def initialise(model, optimizer, loader, batch):
    nn.init.zeros_(model.user.weight)


def dense_zeroed_only(model, optimizer, loader, batch):
    model.top.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


IN_THE_LOOP = {
    "a weight that is replaced": (each_batch(replace_weight), ModelError, "can't be replaced.*load_state_dict"),
    "a hook on a weight": (each_batch(hook_weight), ModelError, "register_hook of the weight of layer 'user'"),
    "ids changed in place": (each_batch(change_ids), ModelError, "does not have in this batch"),
    "a weight in a function": (each_batch(by_function), ModelError, "by calling the layer"),
    "scores of all rows": (
        each_batch(score_all), ModelError, r"linear of the weight of layer 'item'.*keep=\['item'\]"),
    "gradients by autograd.grad": (each_batch(by_autograd), ModelError, "not in memory"),
    "a weight initialised anew": (each_batch(initialise), ModelError, "set it by model.load_state_dict"),
    "only dense parameters zeroed": (each_batch(dense_zeroed_only, zero=False), ModelError, "not zeroed"),
    "no zero_grad": (each_batch(backward, step, zero=False), ModelError, "not zeroed.*optimizer.zero_grad"),
    "two steps": (each_batch(backward, step, step), ModelError, "not zeroed"),
    "two backwards without zero": (each_batch(backward, step, backward, step), ModelError, "not zeroed"),
    "backward after clipping": (each_batch(backward, clip, backward, step), ModelError, "clipped"),
    "backward after some were zeroed in place": (
        each_batch(backward, zero_in_place, backward, step), ModelError, "set them to None"),
    "rows that are not finite": (each_batch(not_finite, step), GradientError, "row .* of table .* not finite"),
    "dense ones that are not finite": (
        each_batch(backward, dense_not_finite, step), GradientError, "dense parameter.*GradScaler"),
    "ids of no batch": (each_batch(other_ids), ModelError, r"torch.no_grad\(\)"),
    "a penalty over all weights": (each_batch(penalty), ModelError, "L2 regularisation.*AdamW"),
    "a gradient that is set": (each_batch(backward, set_gradient), ModelError, "change it in place, or set None"),
    "momentum set later": (each_batch(momentum, backward, step), ConfigError, "cycle_momentum=False"),
    "a state loaded amid an epoch": (each_batch(backward, step, load), ModelError, "before the loop, or after it"),
    "weights loaded amid an epoch": (each_batch(backward, step, load_weights), ModelError, "while training goes on"),
    "a copy of the model": (each_batch(copy_model), ModelError, "state_dict.*bagpipe.export"),
    "a pickled weight": (each_batch(pickle_weight), ModelError, "can't be copied or pickled"),
    "a copy of the optimizer": (each_batch(copy_optimizer), ModelError, r"keep optimizer.state_dict\(\)"),
    "two iterations": (each_batch(second_iteration), ModelError, "use one at a time"),
    "a weight that is read": (each_batch(read_weight), ModelError, r"model.state_dict\(\) or bagpipe.export"),
    "the data of a weight": (each_batch(read_data), ModelError, "not in memory"),
}  # fmt: skip


@pytest.mark.parametrize(("script", "error", "words"), IN_THE_LOOP.values(), ids=IN_THE_LOOP)
def test_what_differs_silently_in_training_is_refused(script, error, words):
    refuses(error, words, script, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))


def accumulating(number):
    def script(model, optimizer, loader, log):
        for place, batch in enumerate(loader):
            loss_of(model, batch).backward()
            if (place + 1) % number == 0:
                optimizer.step()
                optimizer.zero_grad()

    return script


@pytest.mark.parametrize(("told", "done", "words"), [
    (1, 4, "accumulate=N"), (4, 2, "loader.step_due"), (2, 4, "not zeroed"), (4, 3, "loader.step_due"),
])  # fmt: skip
def test_accumulation_other_than_announced_is_refused(told, done, words):
    refuses(ModelError, words, accumulating(done), accumulate=told)


def test_gradients_that_the_last_epoch_left_are_refused():
    def script(model, optimizer, loader, log):
        for number in range(2):
            for place, batch in enumerate(loader):
                loss_of(model, batch).backward()
                if place < 7 or number:
                    optimizer.step()
                    optimizer.zero_grad()

    refuses(ModelError, "not zeroed", script)


@pytest.mark.parametrize("what", ["loss", "batch"])
def test_what_belongs_to_an_earlier_iteration_is_refused(what):
    def script(model, optimizer, loader, log):
        kept = None
        for batch in loader:
            optimizer.zero_grad()
            if kept is not None:
                kept.backward() if what == "loss" else loss_of(model, kept).backward()
            kept = loss_of(model, batch) if what == "loss" else batch

    refuses(ModelError, "batch", script)


def test_a_backward_pass_outside_of_the_loop_is_refused():
    def script(model, optimizer, loader, log):
        loss_of(model, make_batches(1)[0]).backward()

    refuses(ModelError, "outside of the training loop", script)


def test_a_loader_around_ours_that_reads_ahead_is_refused():
    def script(model, optimizer, loader, log):
        batches = iter(loader)
        current = next(batches)
        for following in batches:
            loss_of(model, current).backward()
            current = following

    refuses(ModelError, "those of an earlier one", script)


def test_an_iterator_is_read_once():
    def script(model, optimizer, loader, log):
        epochs(model, optimizer, loader, log)

    refuses(BatchError, "an iterator, which can be read once", script, loader=lambda: iter(make_batches()))


def test_an_optimizer_made_after_prepare_is_refused_at_its_step():
    def script(model, optimizer, loader, log):
        late = sgd(model.parameters())
        for batch in loader:
            loss_of(model, batch).backward()
            late.step()

    refuses(ModelError, "not in memory", script)


def test_a_rate_by_schedule_and_by_group_is_one_too_many():
    def script(model, optimizer, loader, log):
        scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
        epochs(model, optimizer, loader, log, after_step=scheduler.step)

    refuses(ConfigError, "follows a schedule", script, rows=bagpipe.optim.SGD(lambda number: 0.1 / (1 + number)))


@pytest.mark.parametrize("break_at", ["rows", "dense"])
def test_a_gradient_that_is_not_finite_moves_nothing(break_at):
    def script(model, optimizer, loader, log):
        for place, batch in enumerate(loader):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            (loss * float("nan") if place == 3 and break_at == "rows" else loss).backward()
            if place == 3 and break_at == "dense":
                model.top[2].bias.grad.fill_(float("nan"))
            before = {name: value.clone() for name, value in model.state_dict().items()}
            states = copy.deepcopy(optimizer.state_dict())
            if place != 3:
                optimizer.step()
                continue
            with pytest.raises(GradientError, match="not finite"):
                optimizer.step()
            assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
            for key, state in optimizer.state_dict()["state"].items():
                assert all(torch.equal(value, states["state"][key][name]) for name, value in state.items())
        log.append(1)

    assert run(script, True).log == [1]


@pytest.mark.parametrize("damage", ["shape", "missing"])
def test_a_state_that_does_not_fit_is_refused_whole(damage):
    def script(model, optimizer, loader, log):
        epochs(model, optimizer, loader, log)
        state = copy.deepcopy(optimizer.state_dict())
        before = copy.deepcopy(state)
        if damage == "shape":
            state["state"][1]["sum"] = torch.zeros(3, 4)
        else:
            del state["state"][1]["sum"]
        with pytest.raises(ModelError, match="layer 'item'"):
            optimizer.load_state_dict(state)
        for key, of_one in optimizer.state_dict()["state"].items():
            assert all(torch.equal(value, before["state"][key][name]) for name, value in of_one.items())

    run(script, True)


def test_sparse_adam_refuses_dense_parameters_as_it_does_without_us():
    def script(model, optimizer, loader, log):
        epochs(model, optimizer, loader, log)

    with pytest.raises(RuntimeError, match="does not support dense gradients"):
        run(script, True, model=sparse_net, optimizer=of_torch(torch.optim.SparseAdam))


def test_a_group_with_embedding_weights_can_not_be_added():
    """Their place is where they were when the model was prepared."""

    def script(model, optimizer, loader, log):
        optimizer.add_param_group({"params": [model.user.weight]})

    with pytest.raises((BagpipeError, ValueError)):
        run(script, True)


def test_clipping_by_bagpipe_needs_the_loader():
    model = make_net()
    _, optimizer, loader = bagpipe.prepare(model, adagrad(model), make_batches(), **SMALL)
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        assert bagpipe.clip_grad_norm_(model.parameters(), loader, 0.01) > 0
        optimizer.step()


def test_the_model_of_a_refused_class_keeps_its_own_behaviour():
    model = Net()
    with pytest.raises(ConfigError):
        bagpipe.prepare(model, torch.optim.Adam(model.parameters()), make_batches())
    optimizer = torch.optim.Adam(model.parameters())
    before = model.user.weight.clone()
    loss_of(model, make_batches()[0]).backward()
    optimizer.step()
    assert not torch.equal(before, model.user.weight)


def test_the_rate_of_rows_is_set_in_their_param_group_and_nowhere_else():
    model, rows = make_net(), bagpipe.optim.Adam(0.01)
    _, optimizer, loader = bagpipe.prepare(model, sgd(model.parameters()), make_batches(), rows=rows, **SMALL)
    with loader:
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            if number == 2:
                optimizer.param_groups[-1]["lr"] = 0.02
            if number == 4:
                rows.lr = 0.5
                with pytest.raises(ConfigError, match=r"is set to 0.5 in `rows`.*optimizer.param_groups\[-1\]"):
                    optimizer.step()
                rows.lr = 0.02
            optimizer.step()
    assert rows.lr == 0.02
