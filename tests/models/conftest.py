import pytest

from midus.models import fused


@pytest.fixture
def count_steps(monkeypatch):
    """Lets the fused steps run on a CPU, and counts calls of functions that a module uses."""
    monkeypatch.setattr(fused, "_DEVICES", ("cuda", "cpu"))

    def count_steps(module, *names):
        counted = dict.fromkeys(names, 0)

        def counting(name, real):
            def count(*args):
                counted[name] += 1
                return real(*args)

            return count

        for name in names:
            monkeypatch.setattr(module, name, counting(name, getattr(module, name)))
        return counted

    return count_steps
