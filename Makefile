# Everything runs in .venv, which the first call makes and later calls re-use.
PYTHON ?= python3
BIN := .venv/bin
# Threads that wait sleep; else they take the time of other processes, and of each other.
export OMP_WAIT_POLICY ?= PASSIVE
INSTALLED := .venv/.installed
INSTALLED_DOCS := .venv/.installed_docs

.PHONY: demo smollm2 gemma3 test faults processors compatibility sanitize check bench claims engines docs

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hf_memory needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,dev]'
	touch $@

demo: $(INSTALLED)  ## train a small Llama, convert it, compare, generate; all offline
	$(BIN)/hf-memory demo --output demo_output

smollm2: $(INSTALLED)  ## convert SmolLM2-135M-Instruct on two cores; goes on where it was stopped
	$(BIN)/python examples/real_teacher.py

gemma3: $(INSTALLED)  ## the same with Gemma 3 270M, whose terms are at ai.google.dev/gemma/terms
	$(BIN)/python examples/real_teacher.py gemma3

test: $(INSTALLED)  ## all tests but those of faults, without network
	$(BIN)/pytest --numprocesses 2 -m "not planted"

faults: $(INSTALLED)  ## tests that plant faults: do the tests see them?
	$(BIN)/pytest --numprocesses 2 -m planted

COMPARING := $(patsubst %,tests/test_%.py,cache deltaformer mixers modeling placement vllm_plugin)

# The others trace, or import a package: no instructions differ.
COMPUTING := not one_graph and not import_shadows
# torch.compile's cache does not tell apart the instructions that code was compiled for.
processors: export TORCHINDUCTOR_FORCE_DISABLE_CACHES = 1
processors: $(INSTALLED)  ## tests that compare ways of computing, with the instructions of other processors
	ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE $(BIN)/pytest --numprocesses 2 -k "$(COMPUTING)" $(COMPARING)
	ATEN_CPU_CAPABILITY=avx2 $(BIN)/pytest --numprocesses 2 -k "$(COMPUTING)" $(COMPARING)

compatibility:  ## contract tests with the oldest and the newest dependencies that pyproject.toml allows; installs them
	$(PYTHON) .ci/compatibility.py

SANITIZER := .sanitizer
KERNELS := $(patsubst %,tests/test_%.py,kernels layers neural_memory_kernels deltaformer kv_eviction)

$(SANITIZER): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps --ignore-requires-python --target $@ triton==3.8.0 ttsem==0.1.0

sanitize: $(SANITIZER)  ## kernels as they are compiled, executed on the CPU: accesses out of bounds, races, unwritten memory
	TRITON_INTERPRET=0 PYTHONPATH=$(SANITIZER):benchmarks $(BIN)/python -m ttsem.sanitize \
		pytest -q -p sanitizer $(KERNELS) -k "(triton or kernel) and not (compile or custom_ops or run_on or amd)"

check: $(INSTALLED)  ## lint, format, dependency rule, types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/mypy

$(INSTALLED_DOCS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch $@

docs: $(INSTALLED_DOCS)  ## the documentation as a site, in site/; a broken link is an error
	$(BIN)/python docs/draw.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --clean

bench: $(INSTALLED)  ## the tables that fit this machine
	$(BIN)/python benchmarks/ops.py
	$(BIN)/python benchmarks/decode.py

claims: $(INSTALLED)  ## does each memory do what its paper claims? Says first how long it takes; goes on where it was stopped
	$(BIN)/python benchmarks/papers

engines: $(INSTALLED)  ## our models in llama.cpp, mlx-lm and vLLM, which are installed first: twenty minutes, 3 GB
	$(BIN)/python benchmarks/engines.py --build
