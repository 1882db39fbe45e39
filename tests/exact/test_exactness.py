"""Promise I1: whatever the settings and whatever the schedule, the bits are those of the reference."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn.functional import binary_cross_entropy_with_logits

from bagpipe.state import of_reference, of_store
from harness import seams
from harness.events import OTHERS, evaluated, expected_of, written
from harness.examples import examples
from harness.explorer import any_stage, explorer
from harness.flat import prepare
from harness.world import (
    OPTIMIZERS,
    TABLES,
    assert_identical,
    dense_sgd,
    initial,
    make_batches,
    make_model,
    make_reference,
    train_prepared,
    train_reference,
)

MODELS = ("dlrm", "wide_deep", "deep_cross", "deepfm")
BATCHES = make_batches(14, last=3)
EXPECTED = {}


def expected(model, optimizer):
    if (model, optimizer) not in EXPECTED:
        EXPECTED[model, optimizer] = train_reference(BATCHES, OPTIMIZERS[optimizer](), model)[0]
    return EXPECTED[model, optimizer]


def pairwise():
    """A set of settings in which every two values of any two settings meet."""
    choices = {
        "model": MODELS,
        "optimizer": tuple(OPTIMIZERS),
        "lookahead": (1, 2, 7, 200, "auto"),
        "cache": (60, 90, 300),
        "policy": ("lookahead", "lru", "nocache", "ideal"),
        "store": ("memory", "mapped"),
        "threads": (1, 2),
    }
    names = list(choices)
    missing = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in choices[a] for y in choices[b]}
    rows = []
    while missing:
        (a, x), (b, y) = min(missing, key=repr)
        row = {a: x, b: y}
        for name in names:
            if name not in row:
                row[name] = max(
                    choices[name],
                    key=lambda value, name=name: sum(
                        tuple(sorted(((name, value), item), key=lambda pair: names.index(pair[0]))) in missing
                        for item in row.items()
                    ),
                )
        pairs = itertools.combinations([(name, row[name]) for name in names], 2)
        missing -= set(pairs)
        rows.append(tuple(row[name] for name in names))
    return rows


@pytest.mark.parametrize(("model", "optimizer", "lookahead", "cache", "policy", "store", "threads"), pairwise())
def test_every_pair_of_settings_is_bit_identical(model, optimizer, lookahead, cache, policy, store, threads):
    if policy == "ideal":
        cache = 10_000
    if policy == "nocache":
        lookahead = 1
    found, _ = train_prepared(
        BATCHES,
        OPTIMIZERS[optimizer](),
        model,
        lookahead=lookahead,
        cache=cache,
        policy=policy,
        store=store,
        threads=threads,
        driver=seams.threads(60),
    )
    assert_identical(expected(model, optimizer), found)


@examples(60)
@given(
    seed=st.integers(0, 10**6),
    eagerness=st.sampled_from([0.0, 0.5, 2.0, 20.0]),
    last=any_stage(),
    lookahead=st.sampled_from([1, 2, 3, 5, "auto"]),
    policy=st.sampled_from(["lookahead", "lru", "nocache"]),
    cache=st.integers(60, 120),
    depth=st.integers(1, 5),
)
def test_every_schedule_is_bit_identical(seed, eagerness, last, lookahead, policy, cache, depth):
    driver = explorer(seed, eagerness, last)
    lookahead = 1 if policy == "nocache" else lookahead
    found, _ = train_prepared(
        BATCHES,
        OPTIMIZERS["adagrad"](),
        "wide_deep",
        lookahead=lookahead,
        policy=policy,
        cache=cache,
        depth=depth,
        driver=driver,
    )
    assert_identical(expected("wide_deep", "adagrad"), found)


class InParts:
    """A loader with other batches in each epoch."""

    def __init__(self, parts):
        self.parts, self.epoch = parts, 0

    def __iter__(self):
        part, self.epoch = self.parts[self.epoch], self.epoch + 1
        return iter(part)


def train_with_events(parts, events, rows, driver, *, closes, **options):
    """Train an epoch for each part; `events` says what happens at a batch. What was seen then.

    `closes`: the next epoch begins with an empty cache.
    """
    model = make_model("wide_deep")
    optimizer, number, seen = dense_sgd(list(model.parameters())), 0, {}
    options |= {"features": TABLES, "initial": initial, "check": True, "driver": driver}
    model, optimizer, loader = prepare(model, optimizer, InParts(parts), rows, **options)
    for _ in parts:
        for batch in loader:
            event = events.get(number)
            if event == "evaluate":
                seen[number] = evaluated(model)
            elif event == "evaluate less":
                evaluated(model, OTHERS[:1])
            elif event == "save":
                seen[number] = written(loader.loop)
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.labels).backward()
            if event == "skip":
                optimizer.zero_grad()
            elif event == "norm":
                assert loader.loop.grad_norm() > 0
            if event != "skip":
                optimizer.step()
            number += 1
        if closes:
            loader.close()
    loader.close()
    loop = loader.loop
    state = of_store(model, [layout.table.name for layout in loop.layouts], loop.store)
    loop.store.close()
    return state, seen


@examples(40)
@given(
    events=st.dictionaries(st.integers(0, 13), st.sampled_from(["evaluate", "evaluate less", "save", "skip", "norm"])),
    ends=st.sets(st.integers(1, 13), max_size=2),
    seed=st.integers(0, 10**6),
    eagerness=st.sampled_from([0.0, 0.5, 2.0]),
    policy=st.sampled_from(["lookahead", "lru"]),
    cache=st.integers(60, 120),
    closes=st.booleans(),
)
# A barrier has copied a row that is not yet written when the row's eviction follows.
@example(events={8: "evaluate"}, ends={1}, seed=0, eagerness=0.0, policy="lru", cache=60, closes=True)
@example(events={8: "evaluate"}, ends={1}, seed=0, eagerness=0.0, policy="lru", cache=60, closes=False)
def test_what_happens_between_iterations_changes_no_bit(events, ends, seed, eagerness, policy, cache, closes):
    edges = [0, *sorted(ends), len(BATCHES)]
    parts = [BATCHES[start:stop] for start, stop in itertools.pairwise(edges)]
    if all(events.get(number) == "skip" for number in range(len(BATCHES))):
        return
    reference = make_reference(BATCHES, OPTIMIZERS["adam"](), "wide_deep")
    expected_then = expected_of(reference, BATCHES, events)
    driver = explorer(seed, eagerness)
    found, seen = train_with_events(
        parts, events, OPTIMIZERS["adam"](), driver, closes=closes, policy=policy, cache=cache
    )
    assert_identical(of_reference(reference), found)
    assert seen == expected_then, "what is seen in mid-training is what the reference says"
