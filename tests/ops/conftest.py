import pytest
import torch


@pytest.fixture
def seed(record_property) -> int:
    """Another one at every run; the report of a failure names it."""
    number = torch.seed() % 2**31
    record_property("seed", number)
    print(f"seed {number}")
    return number


@pytest.fixture
def poisoned():
    """Fresh memory is filled with NaN, so that an element nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
