"""Models of deepctr-torch, torch-rechub, torchfm and RecBole train under `bagpipe.prepare` as in plain PyTorch.

A few of them in `make test`, all in `make chaos`. docs/ecosystem.md has the figures; page.py writes it.
"""

from __future__ import annotations

import re

import pytest

from bagpipe.errors import BagpipeError, ModelError
from ecosystem import libraries
from ecosystem.models import deepctr
from ecosystem.page import CASES, LEFT_OUT, PAGE, models_of
from ecosystem.training import OPTIMIZERS, distance, moved, others_of, train_plain, train_prepared

FACTOR, LEAST = 10, 1e-6
"""Bagpipe may be so many times as far from plain PyTorch as plain PyTorch is from itself, or as far as rounding."""
FIRST_LOSSES = 3, 1e-5
"""So many losses are as close as this, also where a model makes much of little later on."""
MOVED = 1e-3
"""Rows have moved at least so far, under Adagrad."""

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


@pytest.fixture(scope="session")
def installed():
    """The libraries; what can't be installed is not asked for again."""
    try:
        libraries.load()
    except libraries.NotInstalledError as error:
        pytest.skip(str(error))


def marked(cases):
    return [pytest.param(each, id=each.id, marks=[] if each.quick else [pytest.mark.long]) for each in cases]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", marked(case for case in CASES if not case.why))
def test_a_model_trains_as_in_plain_pytorch(case, optimizer):
    trial = case.make()
    plain, found = train_plain(trial, optimizer), train_prepared(trial, optimizer)
    assert found.evicted, "the cache holds all rows"
    assert optimizer != "Adagrad" or moved(trial, found) >= MOVED
    num_losses, apart = FIRST_LOSSES
    assert found.losses[:num_losses] == pytest.approx(plain.losses[:num_losses], rel=apart, abs=apart)
    of_itself = [distance(plain, train_plain(trial, optimizer, **other)) for other in others_of(optimizer).values()]
    assert distance(plain, found) <= max(LEAST, FACTOR * max(of_itself))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("case", marked(case for case in CASES if case.why))
def test_a_model_that_can_t_be_trained_exactly_is_refused(case):
    with pytest.raises(BagpipeError) as caught:
        train_prepared(case.make(), "SGD")
    assert f"{type(caught.value).__name__}: {caught.value}".startswith(case.error)


@pytest.mark.usefixtures("installed")
def test_a_penalty_over_the_tables_of_deepctr_torch_is_refused_with_what_to_do():
    trial = deepctr("DeepFM", l2_reg_embedding=1e-5).make()
    with pytest.raises(ModelError, match=r"layer 'embedding_dict\.\w+'.*L2 regularisation.*switch it off.*AdamW"):
        train_prepared(trial, "SGD")


def test_the_page_has_every_model():
    assert models_of(PAGE.read_text()) == [(case.library, case.name, bool(case.why)) for case in CASES]
    for library, models in LEFT_OUT.items():
        for name, why in models.items():
            assert re.search(rf"\| {library} \|[^|]*`{name}`[^|]*\| {why} \|", PAGE.read_text()), name


@pytest.mark.usefixtures("installed")
def test_no_model_is_forgotten():
    for library, found in libraries.models().items():
        known = {case.name.partition(" (")[0] for case in CASES if case.library == library}
        names = {name.removesuffix("Model") if library == "torchfm" else name for name in found}
        assert names == known | LEFT_OUT.get(library, {}).keys(), library
