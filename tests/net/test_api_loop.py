"""The loops that people write: accumulation, clipping, mixed precision, several losses, early ends, any loader."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import bagpipe
from harness.flat import prepare
from harness.plain import (
    assert_close,
    assert_same_bits,
    loss_fn,
    loss_of,
    make_batches,
    make_net,
    nothing_left,  # noqa: F401
    sgd,
    train_fast,
    train_plain,
)

pytestmark = pytest.mark.usefixtures("nothing_left")


def session(batches, rows, net=None, **options):
    net = net or make_net()
    return prepare(net, sgd(net.parameters()), batches, rows, **({"cache": 60, "check": True} | options))


def train(net, optimizer, loader, loss=loss_of):
    for batch in loader:
        optimizer.zero_grad()
        loss(net, batch).backward()
        optimizer.step()


@pytest.mark.parametrize("num_batches", [6, 7, 8, 2])
def test_accumulated_batches_are_one_iteration_also_a_short_last_one(num_batches):
    batches = make_batches(num_batches)
    plain = make_net()
    optimizer = sgd(plain.parameters())
    for start in range(0, num_batches, 3):
        optimizer.zero_grad()
        for batch in batches[start : start + 3]:
            (loss_of(plain, batch) / 3).backward()
        optimizer.step()
    rows = bagpipe.optim.SGD(0.1)
    net, optimizer, loader = session(batches, rows, accumulate=3)
    steps = 0
    for batch in loader:
        (loss_of(net, batch) / 3).backward()
        if loader.step_due:
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    assert steps == -(-num_batches // 3) == rows.updates
    assert_close(plain.state_dict(), net.state_dict())


@pytest.mark.parametrize("max_norm", [0.01, 0.3, 100.0])
@pytest.mark.parametrize("by", ["bagpipe", "torch"])
def test_clipping_counts_dense_and_row_gradients_together(max_norm, by):
    batches = make_batches()
    plain = make_net()
    optimizer = sgd(plain.parameters())
    norms = []
    for batch in batches:
        optimizer.zero_grad()
        loss_of(plain, batch).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm))
        optimizer.step()
    net, optimizer, loader = session(batches, bagpipe.optim.SGD(0.1))
    for batch, expected in zip(loader, norms, strict=True):
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        if by == "bagpipe":
            norm = bagpipe.clip_grad_norm_(net.parameters(), loader, max_norm)
        else:
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        torch.testing.assert_close(norm, expected)
        optimizer.step()
    assert_close(plain.state_dict(), net.state_dict())


def test_the_norm_of_rows_alone_and_their_scaling():
    batches = make_batches(3)
    net, plain = make_net(), make_net()
    only_rows = torch.optim.SGD([net.user.weight, net.item.weight], lr=0.1)
    net, optimizer, loader = prepare(net, only_rows, batches, cache=60, check=True)
    for batch, given in zip(loader, batches, strict=True):
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        plain.zero_grad()
        loss_of(plain, given).backward()
        grads = [plain.user.weight.grad, plain.item.weight.grad]
        expected = torch.nn.utils.clip_grad_norm_([plain.user.weight, plain.item.weight], 1e9)
        assert loader.loop.grad_norm() == pytest.approx(expected.item(), rel=1e-5)
        loader.loop.scale_gradients(0.5)
        assert loader.loop.grad_norm() == pytest.approx(expected.item() / 2, rel=1e-5)
        optimizer.step()
        with torch.no_grad():
            for weight, grad in zip([plain.user.weight, plain.item.weight], grads, strict=True):
                weight -= 0.05 * grad
    assert_close(plain.state_dict(), net.state_dict())


def test_a_norm_that_is_not_finite_can_be_an_error():
    net, _, loader = session(make_batches(2), bagpipe.optim.SGD(0.1))
    with loader:
        batches = iter(loader)
        (loss_of(net, next(batches)) * float("inf")).backward()
        with pytest.raises(bagpipe.errors.GradientError, match="norm of all gradients"):
            bagpipe.clip_grad_norm_(net.parameters(), loader, 1.0, error_if_nonfinite=True)
        with pytest.raises(bagpipe.errors.ConfigError, match="max_norm"):
            bagpipe.clip_grad_norm_(net.parameters(), loader, -1.0)


def test_mixed_precision_skips_what_overflows_and_goes_on_exactly():
    """The batch that overflows leaves no trace: the result is that of training without it."""
    batches = make_batches(8)
    bad = 3

    def run(batches, skip):
        rows = bagpipe.optim.Adam(0.01)
        net, optimizer, loader = session(batches, rows)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10**6)
        steps = []
        for number, batch in enumerate(loader):
            before = rows.updates
            optimizer.zero_grad()
            factor = float("inf") if number == skip else 1.0
            scaler.scale(loss_of(net, batch) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            steps.append(rows.updates == before + 1)
        return net.state_dict(), steps, rows.updates, scaler.get_scale()

    with_skip, steps, updates, scale = run(batches, bad)
    without, _, _, unchanged = run(batches[:bad] + batches[bad + 1 :], None)
    assert steps == [True] * bad + [False] + [True] * 4
    assert updates == 7
    assert (scale, unchanged) == (2.0**9, 2.0**10)
    # The scale is a power of two, so dividing it out again changes no bit.
    assert_same_bits(without, with_skip)


def test_unscaled_gradients_can_be_clipped():
    batches = make_batches(4)

    def run(scaled):
        net, optimizer, loader = session(batches, bagpipe.optim.SGD(0.1))
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
        for batch in loader:
            optimizer.zero_grad()
            scaler.scale(loss_of(net, batch)).backward()
            scaler.unscale_(optimizer)
            bagpipe.clip_grad_norm_(net.parameters(), loader, 0.05)
            scaler.step(optimizer)
            scaler.update()
        return net.state_dict()

    assert_same_bits(run(False), run(True))


def test_an_iteration_without_a_step_changes_nothing():
    batches = make_batches(6)
    net, optimizer, loader = session(batches, bagpipe.optim.Adagrad(0.1))
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        if number != 2:
            optimizer.step()
    expected = train_fast(make_net(), batches[:2] + batches[3:], bagpipe.optim.Adagrad(0.1))
    assert_same_bits(expected, net.state_dict())


def test_several_losses_and_backward_passes_add_up():
    def losses(model, batch):
        logits = model(batch)
        return [loss_fn(logits, batch["label"]), 0.1 * logits.square().mean(), 0.3 * logits.sum()]

    batches = make_batches()
    plain = make_net()
    optimizer = sgd(plain.parameters())
    for batch in batches:
        optimizer.zero_grad()
        for loss in losses(plain, batch):
            loss.backward(retain_graph=True)
        optimizer.step()
    net, optimizer, loader = session(batches, bagpipe.optim.SGD(0.1))
    for batch in loader:
        optimizer.zero_grad()
        for loss in losses(net, batch):
            loss.backward(retain_graph=True)
            assert loader.loop.grad_norm() > 0  # looking in between must not miss what comes later
        optimizer.step()
    assert_close(plain.state_dict(), net.state_dict())


def test_a_model_may_be_called_twice_on_a_batch():
    def twice(model, batch):
        return loss_of(model, batch) + model(batch | {"dense": batch["dense"] * 2}).square().mean()

    assert_close(
        train_plain(make_net(), make_batches(), loss=twice), train_fast(make_net(), make_batches(), loss=twice)
    )


def test_outputs_may_be_changed_in_place_as_those_of_plain_layers():
    def in_place(model, batch):
        vectors = model.user(batch["user"])
        vectors.mul_(2.0)
        vectors[0] = 0.0
        return vectors.square().sum() + loss_of(model, batch)

    expected = train_plain(make_net(), make_batches(), loss=in_place)
    assert_close(expected, train_fast(make_net(), make_batches(), loss=in_place))


def test_a_gradient_penalty_reaches_the_rows():
    def penalised(model, batch):
        vectors = model.item(batch["item"])
        loss = 0.01 * (vectors.pow(3).sum(1) * batch["label"]).mean()
        (grad,) = torch.autograd.grad(loss, vectors, create_graph=True)
        return loss + grad.square().sum() + loss_of(model, batch)

    expected = train_plain(make_net(), make_batches(), loss=penalised)
    assert_close(expected, train_fast(make_net(), make_batches(), loss=penalised))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def forward(self, batch):
            dense = batch["dense"].clone().requires_grad_()
            return checkpoint(self._run, batch, dense, use_reentrant=reentrant)

        def _run(self, batch, dense):
            return self.net(batch | {"dense": dense})

    expected = train_plain(Checkpointed(), make_batches())
    assert_close(expected, train_fast(Checkpointed(), make_batches()))


def test_detached_look_ups_get_no_gradient():
    def detached(model, batch):
        with torch.no_grad():
            fixed = model.user(batch["user"])
        return (fixed * model.item(batch["item"])).sum() + model.user(batch["user"]).detach().sum()

    expected = train_plain(make_net(), make_batches(), loss=detached)
    found = train_fast(make_net(), make_batches(), loss=detached)
    assert_close(expected, found)
    assert torch.equal(found["user.weight"], make_net().state_dict()["user.weight"])


def reference_after(count, rows):
    """Weights after so many batches."""
    return train_fast(make_net(), make_batches()[:count], rows)


@pytest.mark.parametrize("store", ["memory", "mapped"])
@pytest.mark.parametrize("policy", ["lookahead", "lru"])
def test_a_break_keeps_what_was_trained(store, policy):
    net, optimizer, loader = session(make_batches(), bagpipe.optim.Adagrad(0.1), store=store, policy=policy, cache=30)
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        optimizer.step()
        if number == 4:
            break
    assert_same_bits(reference_after(5, bagpipe.optim.Adagrad(0.1)), net.state_dict())
    net.eval()
    with torch.no_grad():
        assert net(make_batches()[7]).shape == (6,)


def test_a_loop_that_was_left_begins_anew_with_its_rows():
    rows = bagpipe.optim.Adagrad(0.1)
    net, optimizer, loader = session(make_batches(), rows)
    for _ in range(4):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()
            if rows.updates % 2 == 0:
                break
    expected = train_fast(make_net(), make_batches()[:2] * 4, bagpipe.optim.Adagrad(0.1))
    assert_same_bits(expected, net.state_dict())


def test_an_exception_in_the_loop_surfaces_and_keeps_what_was_trained():
    net, optimizer, loader = session(make_batches(), bagpipe.optim.Adagrad(0.1))

    def train():
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            if number == 3:
                1 / 0  # noqa: B018
            optimizer.step()

    with pytest.raises(ZeroDivisionError):
        train()
    assert_same_bits(reference_after(3, bagpipe.optim.Adagrad(0.1)), net.state_dict())


@pytest.mark.parametrize("with_block", [True, False])
def test_a_loader_that_fails_in_the_middle_ends_the_data(with_block):
    def failing():
        yield from make_batches()[:5]
        raise FileNotFoundError("part-00005.parquet")

    rows = bagpipe.optim.Adagrad(0.1)
    net, optimizer, loader = session(failing(), rows)
    with pytest.raises(FileNotFoundError, match="part-00005"), loader if with_block else nullcontext():
        train(net, optimizer, loader)
    assert rows.updates == 5
    assert_same_bits(reference_after(5, bagpipe.optim.Adagrad(0.1)), net.state_dict())


class Rows(Dataset):
    def __init__(self, size=48):
        self.columns = {
            name: torch.cat([batch[name] for batch in make_batches(size // 6)]) for name in make_batches(1)[0]
        }

    def __len__(self):
        return len(self.columns["label"])

    def __getitem__(self, index):
        return {name: column[index] for name, column in self.columns.items()}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffling_data_loader_gives_what_it_gives_in_a_plain_loop(workers):
    def loader():
        torch.manual_seed(3)
        return DataLoader(Rows(), batch_size=7, shuffle=True, num_workers=workers)

    plain, net = make_net(), make_net()
    expected = train_plain(plain, list(loader()))
    assert_close(expected, train_fast(net, loader()))


@pytest.mark.parametrize("workers", [0, 2])
def test_each_epoch_has_an_order_of_its_own_and_reading_ahead_draws_no_global_random_numbers(workers):
    seen = []

    def run():
        torch.manual_seed(7)
        data = DataLoader(Rows(12), batch_size=5, shuffle=True, num_workers=workers)
        net = make_net()
        net.top.insert(2, nn.Dropout(0.5))
        net, optimizer, loader = session(data, bagpipe.optim.SGD(0.1), net)
        for _ in range(3):
            for batch in loader:
                seen.append(batch["user"].tolist())
                optimizer.zero_grad()
                loss_of(net, batch).backward()
                optimizer.step()
        return net.state_dict(), torch.get_rng_state()

    first, state = run()
    again, same = run()
    assert len(seen) == 2 * 3 * 3
    assert sorted(id_ for batch in seen[:3] for (id_,) in batch) == sorted(
        id_ for batch in seen[3:6] for (id_,) in batch
    )
    assert seen[:3] != seen[3:6], "each epoch has an order of its own"
    assert_same_bits(first, again)
    assert torch.equal(state, same)


def test_batches_without_samples_and_without_ids_are_iterations_like_others():
    def summed(model, batch):
        return model(batch).sum() * 0.1

    empty = {"user": torch.zeros(0, 1, dtype=torch.int64), "item": torch.zeros(0, 3, dtype=torch.int64)}
    empty |= {"dense": torch.zeros(0, 2), "label": torch.zeros(0)}
    batches = make_batches(4)
    batches = [batches[0], empty, batches[1], batches[2], empty, empty, batches[3]]
    expected = train_plain(make_net(), [b for b in batches if len(b["label"])], loss=summed)
    found = train_fast(make_net(), batches, loss=summed)
    assert_close(expected, found)
    assert_close(expected, train_fast(make_net(), [empty, *batches], loss=summed))


def test_bags_may_all_be_empty():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.ids = nn.EmbeddingBag(9, 3, mode="mean")
            self.top = nn.Linear(3, 1)

        def forward(self, batch):
            return self.top(self.ids(*batch["ids"])).squeeze(1)

    def batch(*numbers):
        return {"ids": (torch.tensor(numbers, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))}

    def loss(model, batch):
        return model(batch).square().sum()

    batches = [batch(1, 2), batch(), batch(2, 2, 8), batch()]
    assert_close(train_plain(Bag(), batches, loss=loss), train_fast(Bag(), batches, loss=loss))


def test_epochs_are_one_training_over_all_their_batches():
    batches = make_batches(3)
    net, optimizer, loader = session(batches, bagpipe.optim.Adagrad(0.1))
    for _ in range(3):
        train(net, optimizer, loader)
    assert_same_bits(train_fast(make_net(), batches * 3, bagpipe.optim.Adagrad(0.1)), net.state_dict())
