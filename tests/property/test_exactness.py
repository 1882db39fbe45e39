"""Promise I1: whatever the settings and whatever the schedule, the bits are those of the reference."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bagpipe.trainer.stages import Seeded, Threads
from support import OPTIMIZERS, assert_identical, make_batches, train_accelerated, train_reference

MODELS = ("dlrm", "wide_deep", "deep_cross", "deepfm")
BATCHES = make_batches(14, last=3)
EXPECTED = {}


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread():
    """Matrices this small gain nothing from a second thread, and where cores are few they wait for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    found, _ = train_accelerated(
        BATCHES,
        OPTIMIZERS[optimizer](),
        model,
        lookahead=lookahead,
        cache=cache,
        policy=policy,
        store=store,
        threads=threads,
        driver=Threads(60),
    )
    assert_identical(expected(model, optimizer), found)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    eagerness=st.sampled_from([0.0, 0.5, 2.0, 20.0]),
    last=st.sampled_from([(), ("write-back",), ("prefetch",), ("plan",)]),
    lookahead=st.sampled_from([1, 2, 3, 5, "auto"]),
    policy=st.sampled_from(["lookahead", "lru", "nocache"]),
    cache=st.integers(60, 120),
    depth=st.integers(1, 5),
)
def test_every_schedule_is_bit_identical(seed, eagerness, last, lookahead, policy, cache, depth):
    driver = Seeded(seed, eagerness, frozenset(last))
    lookahead = 1 if policy == "nocache" else lookahead
    found, _ = train_accelerated(
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
