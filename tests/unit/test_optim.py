"""Row optimizers: against torch's sparse optimizers, FBGEMM and formulas in float64; counters, settings, errors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagpipe import optim
from bagpipe.errors import ConfigError
from bagpipe.optim import SGD, Adagrad, Adam, AdamW, Frozen, Momentum, PerTable, RowOptimizer, RowwiseAdagrad
from bagpipe.schedules import Cosine, Warmup
from harness.examples import examples

ROWS, DIM, STEPS = 12, 8, 25
ALL = [
    SGD(0.1),
    Momentum(0.1),
    Momentum(0.1, nesterov=True),
    Adagrad(0.1, initial_accumulator_value=0.5),
    RowwiseAdagrad(0.1, initial_accumulator_value=0.5),
    Adam(0.01),
    AdamW(0.01),
]


def touched(seed: int, *, everything: bool = False) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each step, the rows it touches and their gradients; no step touches row 0."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(STEPS):
        some = np.sort(rng.permutation(np.arange(1, ROWS))[: rng.integers(1, ROWS - 1)])
        rows = np.arange(ROWS) if everything else some
        steps.append((rows, rng.standard_normal((len(rows), DIM)).astype(np.float32)))
    return steps


def start(optimizer: RowOptimizer, dims: tuple[int, ...] = (DIM,), seed: int = 0) -> np.ndarray:
    rows = np.zeros((ROWS, sum(dims) + optimizer.state_width(dims)), np.float32)
    rows[:, : sum(dims)] = np.random.default_rng(seed).standard_normal((ROWS, sum(dims)))
    rows[:, sum(dims) :] = optimizer.initial_state(dims)
    return rows


def train(optimizer: RowOptimizer, steps: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    rows = start(optimizer)
    for number, (which, grads) in enumerate(steps, start=1):
        batch = rows[which]
        optimizer.update(batch, grads, (DIM,), number)
        rows[which] = batch
    return rows


def train_torch(torch_optimizer: Any, steps: list[tuple[np.ndarray, np.ndarray]], *, sparse: bool = True) -> np.ndarray:
    weight = torch.nn.Parameter(torch.from_numpy(start(SGD(0.1))))
    stepped = torch_optimizer([weight])
    with torch.sparse.check_sparse_tensor_invariants():
        for which, grads in steps:
            values = torch.from_numpy(grads)
            indices = torch.from_numpy(which)[None]
            weight.grad = torch.sparse_coo_tensor(indices, values, (ROWS, DIM)) if sparse else values
            stepped.step()
    return weight.detach().numpy()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SGD(0.1), lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
        (Adagrad(0.1), lambda parameters: torch.optim.Adagrad(parameters, lr=0.1)),
        (
            Adagrad(0.1, lr_decay=0.1, initial_accumulator_value=0.3, eps=1e-4),
            lambda parameters: torch.optim.Adagrad(
                parameters, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.3, eps=1e-4
            ),
        ),
        (Adam(0.01), lambda parameters: torch.optim.SparseAdam(parameters, lr=0.01)),
        (
            Adam(0.05, betas=(0.5, 0.9), eps=1e-3),
            lambda parameters: torch.optim.SparseAdam(parameters, lr=0.05, betas=(0.5, 0.9), eps=1e-3),
        ),
    ],
)
def test_updates_are_those_of_torch_on_sparse_gradients(ours: RowOptimizer, theirs: Any) -> None:
    steps = touched(1)
    np.testing.assert_allclose(train(ours, steps)[:, :DIM], train_torch(theirs, steps), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_lazy_momentum_is_one_torch_parameter_a_row_without_gradient_where_untouched(nesterov: bool) -> None:
    ours = Momentum(0.1, 0.8, nesterov=nesterov)
    steps, weights = touched(2), [torch.nn.Parameter(torch.from_numpy(row)) for row in start(SGD(0.1))]
    theirs = torch.optim.SGD(weights, lr=0.1, momentum=0.8, nesterov=nesterov)
    for which, grads in steps:
        theirs.zero_grad()
        for row, grad in zip(which, grads, strict=True):
            weights[row].grad = torch.from_numpy(grad)
        theirs.step()
    expected = np.stack([weight.detach().numpy() for weight in weights])
    np.testing.assert_allclose(train(ours, steps)[:, :DIM], expected, rtol=2e-5, atol=2e-6)


def test_adamw_is_the_formula_that_its_docstring_gives() -> None:
    lr, beta1, beta2, eps, decay, steps = 0.02, 0.8, 0.95, 1e-6, 0.3, touched(3)
    w = start(SGD(0.1)).astype(np.float64)
    m, v = np.zeros_like(w), np.zeros_like(w)
    for step, (which, grads) in enumerate(steps, start=1):
        g = grads.astype(np.float64)
        w[which] = w[which] * (1 - lr * decay)
        m[which] = beta1 * m[which] + (1 - beta1) * g
        v[which] = beta2 * v[which] + (1 - beta2) * g * g
        corrected = m[which] / (1 - beta1**step), v[which] / (1 - beta2**step)
        w[which] = w[which] - lr * corrected[0] / (np.sqrt(corrected[1]) + eps)
    rows = train(AdamW(lr, betas=(beta1, beta2), eps=eps, weight_decay=decay), steps)
    np.testing.assert_allclose(rows, np.hstack([w, m, v]), rtol=2e-5, atol=2e-6)


def test_adamw_is_that_of_torch_where_every_row_is_touched() -> None:
    steps = touched(4, everything=True)
    theirs = train_torch(lambda weights: torch.optim.AdamW(weights, lr=0.02, weight_decay=0.3), steps, sparse=False)
    np.testing.assert_allclose(train(AdamW(0.02, weight_decay=0.3), steps)[:, :DIM], theirs, rtol=2e-5, atol=2e-6)


def test_rowwise_adagrad_is_its_formula_for_every_vector_of_a_row() -> None:
    lr, eps, dims = 0.1, 1e-5, (5, 3)
    optimizer = RowwiseAdagrad(lr, eps=eps, initial_accumulator_value=0.2)
    rows, steps = start(optimizer, dims), touched(5)
    w, s = rows[:, :8].astype(np.float64), np.full((ROWS, 2), 0.2)
    for step, (which, grads) in enumerate(steps, start=1):
        batch = rows[which]
        optimizer.update(batch, grads, dims, step)
        rows[which] = batch
        for vector, columns in enumerate((slice(0, 5), slice(5, 8))):
            g = grads[:, columns].astype(np.float64)
            s[which, vector] += (g * g).mean(axis=1)
            w[which, columns] -= lr * g / (np.sqrt(s[which, vector]) + eps)[:, None]
    np.testing.assert_allclose(rows, np.hstack([w, s]), rtol=2e-5, atol=2e-6)


@pytest.mark.filterwarnings("ignore")  # FBGEMM warns at import about parts that it lacks on CPU
def test_rowwise_adagrad_is_that_of_fbgemm() -> None:
    pytest.importorskip("fbgemm_gpu", reason="fbgemm-gpu-cpu is not installed: pip install 'bagpipe[bench]'")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.1,
        eps=1e-8,
    )
    weight = table.split_embedding_weights()[0]
    weight.copy_(torch.from_numpy(start(SGD(0.1))))
    steps = touched(6)
    for which, grads in steps:
        table(torch.from_numpy(which), torch.arange(len(which) + 1)).backward(torch.from_numpy(grads))
    rows = train(RowwiseAdagrad(0.1, eps=1e-8), steps)
    np.testing.assert_allclose(rows[:, :DIM], weight.numpy(), rtol=2e-5, atol=2e-6)
    state = table.split_optimizer_states()[0][0].numpy()
    np.testing.assert_allclose(rows[:, DIM], state, rtol=2e-5)


@pytest.mark.parametrize("optimizer", ALL, ids=repr)
def test_an_untouched_row_keeps_vector_and_state_to_the_bit(optimizer: RowOptimizer) -> None:
    before, after = start(optimizer), train(optimizer, touched(7))
    assert np.array_equal(before[0].view(np.int32), after[0].view(np.int32))
    assert not np.array_equal(before[1:], after[1:])


@pytest.mark.parametrize("optimizer", ALL, ids=repr)
@given(seed=st.integers(0, 2**32 - 1))
@examples(10)
def test_a_row_does_not_depend_on_the_rows_beside_it(optimizer: RowOptimizer, seed: int) -> None:
    steps = touched(seed)
    together, alone = train(optimizer, steps), start(optimizer)
    for number, (which, grads) in enumerate(steps, start=1):
        for row, grad in reversed(list(zip(which, grads, strict=True))):
            optimizer.update(alone[row : row + 1], grad[None], (DIM,), number)
    assert np.array_equal(together.view(np.int32), alone.view(np.int32))


def test_state_widths_follow_the_vectors_of_a_row() -> None:
    widths = {type(optimizer).__name__: optimizer.state_width((48, 1)) for optimizer in ALL}
    assert widths == {"SGD": 0, "Momentum": 49, "Adagrad": 49, "RowwiseAdagrad": 2, "Adam": 98, "AdamW": 98}
    assert Adagrad(initial_accumulator_value=0.5).initial_state((2, 1)).tolist() == [0.5, 0.5, 0.5]
    assert RowwiseAdagrad(initial_accumulator_value=0.5).initial_state((2, 1)).tolist() == [0.5, 0.5]
    assert Adam().initial_state((2,)).tolist() == [0.0] * 4


def test_frozen_rows_never_change() -> None:
    rows = np.ones((3, 4), np.float32)
    Frozen().update(rows, np.full((3, 4), 9.0, np.float32), (4,), 1)
    assert (rows == 1).all()


def test_scalars_are_float64_formulas_rounded_once() -> None:
    for step in (1, 2, 1000, 10**6):
        rate = 0.001 * math.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        assert Adam(0.001).scalars(step) == (
            np.float32(rate),
            np.float32(1 - 0.9),
            np.float32(1 - 0.999),
            np.float32(1e-8),
        )
    for optimizer in ALL:
        assert all(type(scalar) is np.float32 for scalar in optimizer.scalars(3))
    assert Adagrad(1.0, lr_decay=0.5).scalars(3)[0] == np.float32(0.5)


def test_a_schedule_sees_the_iteration_counted_from_zero() -> None:
    seen: list[int] = []

    def schedule(iteration: int) -> float:
        seen.append(iteration)
        return 0.5**iteration

    assert [SGD(schedule).scalars(step)[0] for step in (1, 2, 3)] == [1.0, 0.5, 0.25]
    assert seen == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"Adam: lr at iteration 4 is nan: give a number of at least 0"):
        Adam(lambda iteration: math.nan).scalars(5)


def test_the_learning_rate_may_be_changed_between_steps() -> None:
    optimizer = SGD(0.1)
    earlier = optimizer.scalars(1)
    optimizer.lr = 0.02
    assert optimizer.scalars(2) == (np.float32(0.02),)
    assert earlier == (np.float32(0.1),), "a gradient applied later keeps the scalars of its own step"
    with pytest.raises(ConfigError, match=r"SGD: lr is -1: give a number of at least 0"):
        optimizer.lr = -1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(-0.1), r"SGD: lr is -0\.1: give a number of at least 0"),
        (lambda: SGD(math.inf), r"SGD: lr is inf"),
        (lambda: SGD(1e39), r"SGD: lr is 1e\+39"),
        (lambda: SGD("0.1"), r"SGD: lr is '0\.1': give a number"),
        (lambda: SGD(True), r"SGD: lr is True: give a number"),
        (lambda: Momentum(0.1, 1.5), r"Momentum: momentum is 1\.5: give a number of at least 0 and at most 1"),
        (lambda: Adagrad(eps=0), r"Adagrad: eps is 0: give a number above 0"),
        (lambda: Adagrad(eps=1e-60), r"Adagrad: eps is 1e-60: give a number above 0"),
        (lambda: Adagrad(lr_decay=-1), r"Adagrad: lr_decay is -1"),
        (lambda: RowwiseAdagrad(initial_accumulator_value=-1), r"RowwiseAdagrad: initial_accumulator_value is -1"),
        (lambda: Adam(betas=(0.9, 1.0)), r"Adam: betas\[1\] is 1\.0"),
        (lambda: Adam(betas=(0.9,)), r"Adam: betas is \(0\.9,\): give two numbers"),
        (lambda: AdamW(weight_decay=math.nan), r"AdamW: weight_decay is nan"),
        (lambda: optim.build("rmsprop", lr=0.1), r"no row optimizer 'rmsprop': choose one of sgd, momentum, adagrad"),
        (lambda: optim.build("sgd", lr=0.1, eps=1), r"'sgd' has no setting 'eps' \(given as 1\): it has lr"),
        (lambda: optim.build("sgd"), r"row optimizer 'sgd' has no lr"),
        (lambda: optim.build("adam", lr={"iterations": 3}), r"without a name: choose one of constant, warmup"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_name_value_and_range(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_optimizers_are_built_and_described_by_their_names() -> None:
    for name in ("sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "adamw"):
        optimizer = optim.build(name, lr=0.25)
        assert optimizer.describe()["name"] == name
        assert optim.build(**optimizer.describe()).describe() == optimizer.describe()
    scheduled = optim.build(
        "adam", lr={"name": "warmup", "then": {"name": "cosine", "lr": 1, "iterations": 9}, "iterations": 3}
    )
    assert scheduled.lr == Warmup(Cosine(1, 9), 3)
    assert optim.build(**scheduled.describe()).lr == scheduled.lr
    assert repr(SGD(0.1)) == "SGD(lr=0.1)"


def test_counters_continue_from_a_saved_state() -> None:
    optimizer, fresh = Adam(0.1), Adam(0.3)
    optimizer.advance()
    optimizer.advance()
    optimizer.lr = 0.2
    fresh.load_state_dict(optimizer.state_dict())
    assert (fresh.updates, fresh.lr) == (2, 0.2)
    scheduled = Adam(Cosine(1.0, 10))
    scheduled.load_state_dict(optimizer.state_dict())
    assert (scheduled.updates, scheduled.lr) == (2, Cosine(1.0, 10))
    with pytest.raises(ConfigError, match="the saved state is of row optimizer 'adam', this is 'adamw'"):
        AdamW().load_state_dict(optimizer.state_dict())
    for broken in (-1, "3", None, True):
        with pytest.raises(ConfigError, match=f"updates is {broken!r}"):
            fresh.load_state_dict(optimizer.state_dict() | {"updates": broken})
    with pytest.raises(ConfigError, match="lr is 'high'"):
        fresh.load_state_dict(optimizer.state_dict() | {"lr": "high", "updates": 7})
    assert (fresh.updates, fresh.lr) == (2, 0.2), "a state that is refused changes nothing"


def test_tables_may_have_optimizers_of_their_own() -> None:
    adagrad, sgd = Adagrad(0.1), SGD(0.2)
    both = PerTable(adagrad, {"ad": sgd})
    assert both.for_table("ad") is both.for_table("t", ["x", "ad"]) is sgd
    assert both.for_table("user", ["layers.user"]) is adagrad
    assert adagrad.for_table("ad") is adagrad
    sgd.advance()
    fresh = PerTable(Adagrad(0.1), {"ad": SGD(0.3)})
    fresh.load_state_dict(both.state_dict())
    assert (fresh.tables["ad"].updates, fresh.default.updates) == (1, 0)
    assert both.describe() == {"name": "per_table", "default": adagrad.describe(), "tables": {"ad": sgd.describe()}}
    with pytest.raises(ConfigError, match=r"given for 'a', 'b', which share the rows of table 't'"):
        PerTable(adagrad, {"a": SGD(1), "b": SGD(1)}).for_table("t", ["a", "b"])
    with pytest.raises(ConfigError, match=r"with tables \['ad'\], this is 'per_table' with tables \[\]"):
        PerTable(adagrad, {}).load_state_dict(both.state_dict())
