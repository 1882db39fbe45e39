"""A position in the data is one of the loader that it was saved with, or refused (I8)."""

import pytest

from bagpipe.data import Loader, generated
from bagpipe.errors import ConfigError, ModelError
from bagpipe.trainer.reading import Epochs

DATA = generated("tiny", 70)


def test_a_position_in_other_data_is_refused():
    saved = Loader(DATA, 32, seed=1)
    epochs = Epochs(Loader(DATA, 32, seed=2))
    with pytest.raises(ConfigError, match="seed 1, this loader has 2"):
        epochs.check({"batches": 2, "loader": saved.state_dict(2)})
    with pytest.raises(ModelError, match=r"'three' batches into the data"):
        epochs.check({"batches": "three"})
    assert [batch.number for batch in epochs.next()] == [0, 1, 2]
