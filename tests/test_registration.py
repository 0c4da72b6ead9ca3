"""`import midus` costs nothing, breaks nothing, and is enough, in whatever order things come."""

import subprocess
import sys

import pytest
from forked import Forks
from tiny import MEMORY, save_base

from midus import UpscaleConfig, upscale_checkpoint

LOADS = {
    "model": "from transformers import AutoModelForCausalLM as A; A.from_pretrained(path)",
    "tokenizer first": (
        "from transformers import AutoTokenizer, AutoModelForCausalLM as A\n"
        "AutoTokenizer.from_pretrained(path); A.from_pretrained(path)"
    ),
    "config": "from transformers import AutoConfig; AutoConfig.from_pretrained(path)",
    "config by name": "from transformers import AutoConfig; AutoConfig.for_model('midus_llama')",
    "headless": "from transformers import AutoModel; AutoModel.from_pretrained(path)",
    "family class first": (
        "from transformers import LlamaForCausalLM, AutoModelForCausalLM as A\n"
        "A.from_pretrained(path)"
    ),
    "family config first": (
        "from transformers import LlamaConfig, AutoModelForCausalLM as A; A.from_pretrained(path)"
    ),
    "modeling module first": (
        "import transformers.models.qwen2.modeling_qwen2\n"
        "from transformers import AutoModelForCausalLM as A; A.from_pretrained(path)"
    ),
    "pipeline": (
        "from transformers import pipeline\n"
        "pipeline('text-generation', path)('w5', max_new_tokens=2)"
    ),
    "own classes": "from midus.models import MidusLlamaForCausalLM as M; M.from_pretrained(path)",
}
BENEATH_TRANSFORMERS = [
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor",
    "tokenizers",
    "huggingface_hub",
    "safetensors.torch",
    "sklearn.metrics",
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("registration")
    save_base(folder / "base")
    upscale_checkpoint(folder / "base", folder / "full", UpscaleConfig(memory=MEMORY))
    return folder / "full"


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """Processes that have imported neither midus nor transformers, only what transformers does."""
    forks = Forks(tmp_path_factory.mktemp("fresh"), *BENEATH_TRANSFORMERS)
    assert not {"midus", "transformers"} & forks.imported
    yield forks
    forks.close()


@pytest.mark.parametrize("first", ["import midus", "import transformers; import midus"])
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_loading_works_in_a_fresh_process(checkpoint, fresh, first, load):
    fresh.run(f"path = {str(checkpoint)!r}\n{first}\n{load}")


def test_loading_works_where_nothing_was_imported_before(checkpoint):
    code = f"path = {str(checkpoint)!r}\nimport midus\n{LOADS['model']}"
    subprocess.run([sys.executable, "-c", code], check=True, stdin=subprocess.DEVNULL)


def test_importing_midus_after_the_auto_classes(checkpoint, fresh):
    code = (
        "from transformers import AutoConfig, AutoModelForCausalLM\n"
        "import midus\n"
        f"AutoModelForCausalLM.from_pretrained({str(checkpoint)!r})\n"
        "for name in ('from_pretrained', 'for_model'):\n"
        "    assert 'midus' not in repr(vars(AutoConfig)[name])"
    )
    fresh.run(code)


def test_other_models_load_as_before(checkpoint, fresh):
    code = (
        "import midus\nfrom transformers import AutoModelForCausalLM as A, LlamaForCausalLM\n"
        f"assert type(A.from_pretrained({str(checkpoint.parent / 'base')!r})) is LlamaForCausalLM"
    )
    fresh.run(code)


def test_importing_midus_is_light():
    code = "import sys, midus; print(sorted({'torch', 'transformers', 'rich'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom midus.cli.main import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
