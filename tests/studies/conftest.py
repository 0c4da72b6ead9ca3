import gc
import shutil

import pytest
import yaml
from small import HML, make_material, make_study
from small_sft import LORA, SEEDS, write_rows

from midus.studies.run import run_study


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    # Studies of tests that run side by side must not be seen on this machine's device.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIDUS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def material(tmp_path_factory):
    return make_material(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="session")
def finished(material, tmp_path_factory):
    """A study that has ended, its folder, and what it said."""
    gc.freeze()  # it is made before the fixture below comes to it
    out = tmp_path_factory.mktemp("finished")
    study = make_study(material, measure=["slots", "gradients", "rank", "gates"])
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


@pytest.fixture(scope="session")
def config(tmp_path_factory):
    """A file of `midus train` whose model and output are nowhere."""
    folder = tmp_path_factory.mktemp("instructions")
    values = {
        "stage": "sft",
        "model": "nowhere",
        "output": "nowhere",
        "data": {"sources": str(write_rows(folder / "rows.jsonl")), "held_out": 0.1},
        "max_length": 32,
        "batch_size": 4,
        "precision": "float32",
        "optimizer": {"lr": 1e-3},
        "trainer": {"max_steps": 5, "per_device_train_batch_size": 2, "report_to": "none"},
    }
    path = folder / "words.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture(scope="session")
def study_folder(material, tmp_path_factory):
    """A study that has kept models of three kinds: whole, delta and adapters."""
    out = tmp_path_factory.mktemp("kept")
    methods = {
        "full": {"keep": True, "label": "all weights"},
        "hml": {"keep": True, "set": HML},
        "lora": {"keep": True, "set": LORA},
        "gone": {"set": {"upscale.method": "llama_pro"}},
    }
    study = make_study(
        material,
        methods=methods,
        search={},
        final_seeds=SEEDS,
        texts={"other": material["text"]},
        curve_points=1,
    )
    run_study(study, out)
    return out


@pytest.fixture
def copied(study_folder, tmp_path):
    """The study at another place, with nothing fine-tuned."""
    out = tmp_path / "study"
    shutil.copytree(study_folder, out, ignore=shutil.ignore_patterns("sft"))
    return out
