"""POT is asked for nothing but NumPy and PyTorch: other frameworks take a GPU's memory."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("code", "is_imported"),
    [("import ot", True), ("from midus.upscaling.opt_deus import _pot; _pot()", False)],
)
def test_a_framework_that_lies_about_is_not_started(tmp_path, code, is_imported):
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text(
        f"open({str(tmp_path / 'started')!r}, 'w').close()\nraise ImportError('a stand-in')\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("POT_BACKEND")}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
    assert (tmp_path / "started").exists() == is_imported
