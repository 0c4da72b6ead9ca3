import pytest
from benchmarks import save_byte_model, write_benchmarks


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    return write_benchmarks(tmp_path_factory.mktemp("benchmarks"))


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory):
    """Folder of a tiny model that reads any text."""
    folder = tmp_path_factory.mktemp("models") / "bytes"
    save_byte_model(folder)
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MIDUS_CACHE", str(tmp_path / "cache"))
