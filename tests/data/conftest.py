"""The tiny model whose tokenizer the tests of this folder use."""

import pytest
from tiny import save_base


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_base(folder)
    return folder
