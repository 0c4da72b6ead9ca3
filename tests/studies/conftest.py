import gc

import pytest
from small import make_material, make_study

from midus.studies.run import run_study


@pytest.fixture(scope="session")
def material(tmp_path_factory):
    return make_material(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="session")
def finished(material, tmp_path_factory):
    """A study that has ended, its folder, and what it said."""
    gc.freeze()  # it is made before the fixture below comes to it
    out = tmp_path_factory.mktemp("finished")
    study = make_study(material, measure=["slots", "gradients", "rank"])
    said = []
    progress = run_study(study, out, say=said.append)
    assert (progress.ran, progress.left, progress.is_out_of_time) == (4, 0, False)
    return study, out, said


@pytest.fixture(autouse=True, scope="module")
def _quick_collection():
    # Trials collect what they leave behind; what the libraries hold need not be looked at again.
    gc.freeze()
    yield
    gc.unfreeze()
