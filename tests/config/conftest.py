"""Each choice of groups is composed once for all tests of the configuration."""

import pickle

import pytest

from wan_ds.config import composition

PICKLED: dict[tuple, bytes] = {}  # pickle copies a configuration five times faster than copy.deepcopy


@pytest.fixture(autouse=True, scope="module")
def _compose_each_choice_once():
    """Hydra takes a fifth of a second for one composition, and most tests here have the same choices."""
    compose = composition._composed

    def composed(arguments, choices):
        if arguments.config_dir is not None:
            return compose(arguments, choices)
        key = (arguments.config_name, *choices)
        if key not in PICKLED:
            PICKLED[key] = pickle.dumps(compose(arguments, choices))
        return pickle.loads(PICKLED[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composition, "_composed", composed)
        yield
