"""Evaluation changes nothing; state can be saved, loaded, exported; the model reads its rows when training is over."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import bagpipe
from bagpipe.errors import BatchError, ModelError, ValueRangeError
from harness import sabotage, seams
from harness.explorer import explorer
from harness.plain import (
    assert_close,
    assert_same_bits,
    loss_of,
    make_batches,
    make_net,
    nothing_left,  # noqa: F401
    sgd,
    train_plain,
)

pytestmark = pytest.mark.usefixtures("nothing_left")
OTHERS = make_batches(5, seed=77)
"""For evaluation; they name rows that training has not seen."""


def adagrad():
    return bagpipe.optim.Adagrad(0.1)


def train(during, batches=None, dropout=True, **options):
    """Train with dropout, calling `during(net, loop, number)` in each iteration."""
    net, rows = make_net(), adagrad()
    if dropout:
        net.top.insert(2, nn.Dropout(0.5))
    batches = make_batches(10) if batches is None else batches
    loop = bagpipe.accelerate(net, batches, rows, **({"cache": 30, "check": True} | options))
    dense = sgd(net.parameters())
    torch.manual_seed(1)
    with loop:
        for number, batch in enumerate(loop):
            dense.zero_grad()
            loss = loss_of(net, batch)
            during(net, loop, number, "before the backward pass")
            loss.backward()
            during(net, loop, number, "before the step")
            dense.step()
            rows.step()
            during(net, loop, number, "after the step")
    return net, rows, loop


def nothing(*_):
    pass


def whole(net, loop, number, where):
    net.eval()
    with torch.no_grad():
        for batch in loop.evaluate(OTHERS):
            net(batch)
    net.train()


def broken_off(net, loop, number, where):
    for batch in loop.evaluate(OTHERS):
        net(batch)
        break


def held(net, loop, number, where, kept=[]):  # noqa: B006
    """The evaluation is never finished, and let go at some later time."""
    iterator = loop.evaluate(OTHERS)
    net(next(iterator)).sum()
    kept.append(iterator)
    if len(kept) > 3:
        kept.pop(0)


def shuffled(net, loop, number, where):
    for batch in loop.evaluate(
        DataLoader(torch.arange(20).reshape(10, 2), batch_size=3, shuffle=True, collate_fn=pairs)
    ):
        net(batch)
        break


def pairs(samples):
    ids = torch.stack(samples)
    return {"user": ids[:, :1], "item": ids, "dense": torch.zeros(len(ids), 2)}


def saving(net, loop, number, where):
    net.state_dict()
    loop.state_dict()


@pytest.mark.parametrize("during", [whole, broken_off, held, shuffled, saving])
@pytest.mark.parametrize("policy", ["lookahead", "lru"])
def test_evaluating_in_the_middle_of_training_changes_no_bit(during, policy):
    expected, *_ = train(nothing, policy=policy)
    dropout = during is not held  # it would draw from the generator of the model's own dropout
    if not dropout:
        expected, *_ = train(nothing, policy=policy, dropout=False)

    def once(net, loop, number, where):
        if number in (0, 3, 4, 9):
            state = torch.get_rng_state()
            during(net, loop, number, where)
            if during is broken_off or during is shuffled:
                torch.set_rng_state(state)  # dropout was on in the evaluation too, which is the user's choice
            assert torch.equal(state, torch.get_rng_state())

    found, *_ = train(once, policy=policy, dropout=dropout)
    assert_same_bits(expected.state_dict(), found.state_dict())


def evaluate_now_and_then(seed):
    """Whether an evaluation under a random schedule ever sees something else than plain training."""
    net, plain, rows = make_net(), make_net(), bagpipe.optim.SGD(0.1)
    batches = make_batches(12, seed=seed % 5)
    loop = bagpipe.accelerate(net, batches, rows, cache=30, policy="lru", driver=explorer(seed, eagerness=0.5))
    optimizer, dense = sgd(plain.parameters()), sgd(net.parameters())
    with loop:
        for number, (batch, given) in enumerate(zip(loop, batches, strict=True)):
            for model, part, parts in ((net, batch, (dense, rows)), (plain, given, (optimizer,))):
                model.zero_grad()
                loss_of(model, part).backward()
                for each in parts:
                    each.step()
            if number % 4 < 3:
                continue
            with torch.no_grad():
                for other, theirs in zip(loop.evaluate(OTHERS), OTHERS, strict=True):
                    if not torch.allclose(net(other), plain(theirs), rtol=1e-4, atol=1e-5):
                        return True
    return False


def test_an_evaluation_sees_every_update_whatever_the_schedule():
    assert not any(evaluate_now_and_then(seed) for seed in range(20))


def test_a_barrier_that_forgets_rows_on_their_way_to_the_store_is_noticed(monkeypatch):
    """Victims that leave the cache while the barrier begins; what the test above is there for."""

    sabotage.forget_victims_at_barriers(monkeypatch)
    assert any(evaluate_now_and_then(seed) for seed in range(20))


def test_evaluation_interleaved_with_training_reads_what_training_has_written():
    net, rows = make_net(), bagpipe.optim.SGD(0.5)
    plain = make_net()
    optimizer, batches = torch.optim.SGD(plain.parameters(), lr=0.5), make_batches(5)
    loop = bagpipe.accelerate(net, batches, rows, cache=60)
    dense = torch.optim.SGD(net.parameters(), lr=0.5)
    with loop:
        other = loop.evaluate(OTHERS)
        for given, theirs in zip(batches, OTHERS, strict=True):
            with torch.no_grad():
                torch.testing.assert_close(net(next(other)), plain(theirs))
            batch = next(iter(loop))
            for model, part, parts in ((net, batch, (dense, rows)), (plain, given, (optimizer,))):
                model.zero_grad()
                loss_of(model, part).backward()
                for each in parts:
                    each.step()


def test_evaluation_before_and_after_training():
    net, rows = make_net(), adagrad()
    loop = bagpipe.accelerate(net, make_batches(), rows, cache=60)

    def outputs():
        with torch.no_grad():
            return torch.cat([net(batch) for batch in loop.evaluate(OTHERS)])

    with torch.no_grad():
        torch.testing.assert_close(outputs(), torch.cat([make_net()(batch) for batch in OTHERS]))
    dense = sgd(net.parameters())
    with loop:
        for batch in loop:
            dense.zero_grad()
            loss_of(net, batch).backward()
            dense.step()
            rows.step()
        inside = outputs()
    with torch.no_grad():
        by_raw_ids = torch.cat([net(batch) for batch in OTHERS])
    assert torch.equal(inside, outputs())
    assert torch.equal(inside, by_raw_ids)
    plain = make_net()
    plain.load_state_dict(net.state_dict(), strict=True)
    with torch.no_grad():
        torch.testing.assert_close(inside, torch.cat([plain(batch) for batch in OTHERS]))


def test_evaluation_refuses_bad_ids_and_batches_without_the_features():
    net, rows = make_net(), adagrad()
    loop = bagpipe.accelerate(net, make_batches(), rows)
    bad = [OTHERS[0] | {"user": torch.tensor([[30]] * 6)}]
    with pytest.raises(ValueRangeError, match="feature 'user' has id 30"):
        list(loop.evaluate(bad))
    with pytest.raises(BatchError, match=r"no ids of feature 'user'.*'other'"):
        list(loop.evaluate([{"other": torch.tensor([[3]])}]))


def test_state_dicts_have_plain_names_and_load_both_ways():
    trained = train_plain(make_net(), make_batches())
    net, rows = make_net(), bagpipe.optim.SGD(0.1)
    loop = bagpipe.accelerate(net, make_batches(4, seed=8), rows, cache=60)
    net.load_state_dict(trained, strict=True)
    assert_same_bits(trained, net.state_dict())
    dense = sgd(net.parameters())
    with loop:
        for batch in loop:
            dense.zero_grad()
            loss_of(net, batch).backward()
            dense.step()
            rows.step()
    plain = make_net()
    plain.load_state_dict(trained)
    assert_close(train_plain(plain, make_batches(4, seed=8)), net.state_dict())
    net.load_state_dict(trained)
    assert_same_bits(trained, net.state_dict())


def test_a_state_dict_with_other_names_or_shapes_is_refused_as_torch_does():
    net = make_net()
    bagpipe.accelerate(net, make_batches(), adagrad())
    state = make_net().state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*user\.weight"):
        net.load_state_dict({name: value for name, value in state.items() if name != "user.weight"})
    with pytest.raises(RuntimeError, match=r"item\.weight has shape"):
        net.load_state_dict(state | {"item.weight": torch.ones(3, 3)})
    assert net.load_state_dict({}, strict=False).unexpected_keys == []


def test_a_weight_too_large_for_a_state_dict_is_refused_by_name(monkeypatch):
    net = make_net(device="meta")
    net.user = nn.EmbeddingBag(10**9, 4, mode="sum", device="meta")
    bagpipe.accelerate(net, make_batches(), adagrad(), cache=500)
    with pytest.raises(ModelError, match=r"'user' has 16\.0 GB of weights.*bagpipe\.export"):
        net.state_dict()
    monkeypatch.setattr(*seams.STATE_BYTES_MAX, 100)
    _, _, loop = train(nothing)
    with pytest.raises(ModelError, match=r"touched rows take .* too many for a state_dict"):
        loop.state_dict()


OPTIMIZERS = {
    "adam": lambda: bagpipe.optim.Adam(lambda step: 0.1 / (1 + step)),
    "per table": lambda: bagpipe.optim.PerTable(
        bagpipe.optim.Momentum(0.1), {"user": bagpipe.optim.RowwiseAdagrad(0.1)}
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_goes_on_from_a_saved_state_with_the_same_bits(name, accumulate):
    batches = make_batches(10)

    def run(batches, rows, saved=None, at=None):
        net = make_net()
        loop = bagpipe.accelerate(net, batches, rows, cache=60, check=True, accumulate=accumulate)
        file = io.BytesIO()
        if saved is not None:
            state = torch.load(io.BytesIO(saved), weights_only=True)
            loop.load_state_dict(state["rows"])
            net.top.load_state_dict(state["dense"])
        dense = sgd(net.parameters())
        with loop:
            for number, batch in enumerate(loop):
                loss_of(net, batch).backward()
                if loop.step_due:
                    dense.step()
                    rows.step()
                    dense.zero_grad()
                if number == at:
                    torch.save({"rows": loop.state_dict(), "dense": net.top.state_dict()}, file)
        return net.state_dict(), loop.state_dict(), file.getvalue()

    expected, expected_rows, saved = run(batches, OPTIMIZERS[name](), at=5)
    found, found_rows, _ = run(batches, OPTIMIZERS[name](), saved)
    assert_same_bits(expected, found)
    assert expected_rows["optimizer"] == found_rows["optimizer"]
    for table, part in expected_rows["tables"].items():
        order, other = (torch.argsort(each["ids"]) for each in (part, found_rows["tables"][table]))
        for key in ("ids", "rows"):
            assert torch.equal(part[key][order], found_rows["tables"][table][key][other])


def test_statistics_count_what_moved():
    _, _, loop = train(nothing, policy="nocache", driver=seams.threads(30))
    stats = loop.stats()
    unique = sum(len(b["user"].unique()) + len(b["item"].unique()) for b in make_batches(10))
    assert stats["iterations"] == 10
    assert stats["fetched_rows"] == stats["written_rows"] == unique
    assert stats["hit_rate"] == 0.0
    assert stats["cache_rows"] == 30
    assert stats["cache_bytes"] == 30 * 8 * 4
