"""A grown model, its base and a run, made once."""

import pytest
from pages import make_model, make_run


@pytest.fixture(scope="session")
def stored(tmp_path_factory):
    """A folder with ``base``, ``grown`` (a delta of it) and ``run``, whose model is ``grown``."""
    folder = tmp_path_factory.mktemp("stored")
    make_run(folder / "run", make_model(folder))
    return folder


@pytest.fixture(scope="session")
def grown_id(stored):
    from midus.models.identity import model_id

    return model_id(stored / "grown")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    # `analysis/` of the current folder belongs to every report.
    monkeypatch.chdir(tmp_path)
