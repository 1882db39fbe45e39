"""The code for accelerators, run on the CPU: equal to the NumPy definition to float tolerance, and it trains."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import bagpipe
from bagpipe import row_ops
from bagpipe.cache import RowCache
from bagpipe.errors import GradientError, ModelError
from bagpipe.kernels.bag import NO_PADDING, Bags
from definitions.bag import define_accumulate, define_pool
from harness.plain import (
    assert_close,
    assert_same_bits,
    loss_of,
    make_batches,
    make_net,
    nothing_left,  # noqa: F401
    sgd,
    train_fast,
    train_plain,
)
from harness.started import start

pytestmark = pytest.mark.usefixtures("nothing_left")
ON_DEVICE = row_ops.DeviceRows(torch.device("cpu"))


@pytest.fixture
def forced(monkeypatch):
    monkeypatch.setattr(row_ops, "_force", True)


def random_bags(random, rows, kind):
    """The same bags for both: NumPy arrays and tensors."""
    samples = int(random.integers(0, 6))
    if kind == "jagged":
        lengths = random.integers(0, 4, samples)
        places = random.integers(0, rows, int(lengths.sum()), dtype=np.int32)
        offsets = np.cumsum(lengths) - lengths
    else:
        places, offsets = random.integers(0, rows, (samples, 1 if kind == "single" else 3), dtype=np.int32), None
    weights = random.random(places.shape, np.float32) if random.random() < 0.4 else None
    mean = weights is None and bool(random.random() < 0.5)
    padding = 1 if random.random() < 0.5 else NO_PADDING
    host = Bags(places, offsets, weights, mean, padding)
    tensors = [None if part is None else torch.from_numpy(part) for part in (offsets, weights)]
    return host, ON_DEVICE.make_bags(places, *tensors, mean, padding)


@pytest.mark.parametrize("kind", ["single", "equal", "jagged"])
def test_pooling_and_adding_up_are_those_of_the_definition(kind):
    random = np.random.default_rng(3)
    for _ in range(60):
        num_slots, rows, width, column, dim = 30, int(random.integers(2, 9)), 9, 2, 5
        cache = random.standard_normal((num_slots, width)).astype(np.float32)
        slots = random.permutation(num_slots)[:rows].astype(np.int32)
        host, device = random_bags(random, rows, kind)
        expected = np.empty((len(host), dim), np.float32)
        assert define_pool(cache, slots, host, column, expected) == -1
        found = ON_DEVICE.pool(torch.from_numpy(cache), slots, device, column, expected.shape, None)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)
        grad = random.standard_normal((len(host), dim)).astype(np.float32)
        buffer = random.standard_normal((rows, width)).astype(np.float32)
        added = torch.from_numpy(buffer.copy())
        assert define_accumulate(grad, host, buffer, column) == -1
        ON_DEVICE.accumulate(torch.from_numpy(grad), device, added, column)
        np.testing.assert_allclose(added.numpy(), buffer, rtol=1e-5, atol=1e-6)


def test_adding_up_has_a_fixed_order():
    random = np.random.default_rng(4)
    places = random.integers(0, 5, (200, 3), dtype=np.int32)
    bags = ON_DEVICE.make_bags(places, None, None, False, NO_PADDING)
    grad = torch.from_numpy(random.standard_normal((200, 4)).astype(np.float32))
    results = []
    for _ in range(3):
        buffer = torch.zeros(5, 4)
        ON_DEVICE.accumulate(grad, bags, buffer, 0)
        results.append(buffer.numpy().tobytes())
    assert len(set(results)) == 1


def test_a_cache_moves_rows_as_one_on_the_host_does(forced):
    caches = [RowCache([6, 4, 6], [10, 5], torch.device("cpu"))]
    row_ops._force = False
    caches.append(RowCache([6, 4, 6], [10, 5], torch.device("cpu")))
    row_ops._force = True
    values = np.random.default_rng(0).random((3, 6), np.float32)
    ids, slots = np.array([7, 8, 9]), np.array([4, 0, 9], np.int32)
    for cache in caches:
        cache.fence()
        cache.insert(2, ids, slots, values)
        cache.mark_updated(2, slots[1:])
        rows = cache.copy_out(2, ids, slots)
        assert rows.ids.tolist() == [8, 9]
        assert rows.values.tobytes() == values[1:].tobytes()
        cache.insert(0, ids, slots, np.zeros((3, 2), np.float32))
        expected = values.copy()
        expected[:, :2] = 0
        assert cache.read(0, slots).tobytes() == expected.tobytes()


OPTIMIZERS = {
    "sgd": (lambda: bagpipe.optim.SGD(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "adagrad": (lambda: bagpipe.optim.Adagrad(0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, {"padding_idx": 3, "mode": "mean"}])
def test_training_gives_what_plain_pytorch_gives(forced, name, options):
    rows, plain = OPTIMIZERS[name]
    expected = train_plain(make_net(**options), make_batches(), (plain, sgd))
    found = train_fast(make_net(**options), make_batches(), rows(), cache=40, policy="lru")
    assert_close(expected, found, rtol=1e-4, atol=1e-5)


def test_training_twice_gives_the_same_bits(forced):
    runs = [train_fast(make_net(), make_batches(), bagpipe.optim.Adam(0.01)) for _ in range(2)]
    assert_same_bits(*runs)


def test_everything_else_of_the_loop_works_there_too(forced):
    net, optimizer, loader = start(rows=bagpipe.optim.SGD(0.1), cache=40, accumulate=2, device="cpu", check=True)
    plain = make_net()
    of_plain = sgd(plain.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for number, batch in enumerate(loader):
        scaler.scale(loss_of(net, batch)).backward()
        loss_of(plain, make_batches()[number]).backward()
        if not loader.step_due:
            continue
        scaler.unscale_(optimizer)
        norm = bagpipe.clip_grad_norm_(net.parameters(), loader, 0.1)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
        of_plain.step()
        for each in (optimizer, of_plain):
            each.zero_grad()
        with torch.no_grad():
            for other in make_batches(2, seed=8):
                torch.testing.assert_close(net(other), plain(other))
    assert_close(plain.state_dict(), net.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(net(make_batches()[0]), plain(make_batches()[0]))


def test_wrong_ids_and_gradients_are_refused_there_too(forced):
    net, optimizer, loader = start()
    with loader:
        iterator = iter(loader)
        earlier = next(iterator)
        batch = next(iterator)
        with pytest.raises(ModelError, match="not those of an earlier one"):
            net(earlier)
        with pytest.raises(ModelError, match=r"'user' is given id \d+, which 'user' does not have .*'item' has it"):
            net.user(batch["item"])
        (loss_of(net, batch) * float("nan")).backward()
        with pytest.raises(GradientError, match="iteration 1"):
            optimizer.step()


def test_the_cache_is_where_the_dense_parameters_are():
    net = make_net().to("meta")
    net.top = torch.nn.Linear(10, 1)
    assert start(net=net)[2].loop.cache.device == torch.device("cpu")
    assert row_ops.ops_on(torch.device("cpu")).in_kernels
    assert not row_ops.ops_on(torch.device("meta")).in_kernels
