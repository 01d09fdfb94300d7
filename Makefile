# Everything runs in .venv, which the first call makes and later calls re-use.
PYTHON ?= python3
BIN := .venv/bin
# Threads that wait sleep; else they take the time of other processes, and of each other.
export OMP_WAIT_POLICY ?= PASSIVE
INSTALLED := .venv/.installed
INSTALLED_DOCS := .venv/.installed_docs
INSTALLED_SPACE := .venv/.installed_space

.PHONY: demo smollm2 gemma3 space test complete faults processors processor_default processor_avx2 compatibility sanitize check bench claims engines docs

$(INSTALLED): pyproject.toml constraints.txt src/hf_memory/__init__.py
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

# without constraints.txt: gradio needs an older Pillow
$(INSTALLED_SPACE): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[space]'
	touch $@

space: $(INSTALLED_SPACE)  ## a page on which a teacher and its student answer; the models of make demo, or TEACHER=name
	$(BIN)/python examples/space/app.py $(TEACHER)

test: $(INSTALLED)  ## all tests but those of faults and the full product of cases, without network
	$(BIN)/pytest --numprocesses 2 --dist worksteal -m "not planted and not complete"

complete: $(INSTALLED)  ## the full product of cases that other runs leave out; CI does so each week
	$(BIN)/pytest --numprocesses 2 --dist worksteal -m complete

faults: $(INSTALLED)  ## tests that plant faults: do the tests see them?
	$(BIN)/pytest -m planted tests/test_planted_faults.py

# Tests that compare two ways of computing; others call the same code, or compute nothing.
COMPARING := $(patsubst %,tests/test_%.py,deltaformer mixers placement vllm_plugin)
COMPARING += $(addprefix tests/test_modeling.py::test_,step_by_step_equals_full_forward \
	any_split_of_a_prefill_equals_the_whole padded_rows_equal_rows_alone packed_rows_equal_rows_apart \
	positions_that_jump_ahead_are_one_text a_row_in_chunks_has_the_gradients_of_the_whole \
	gradient_checkpointing_changes_no_gradient backends_agree)
COMPARING += $(addprefix tests/test_cache.py::test_,cropped_tokens_were_never_read rows_move_with_their_past)

PROCESSORS := processor_default processor_avx2
processors: $(PROCESSORS)  ## tests that compare ways of computing, with the instructions of other processors
processor_default: export MKL_CBWR = COMPATIBLE
$(PROCESSORS): processor_%: $(INSTALLED)
	ATEN_CPU_CAPABILITY=$* $(BIN)/pytest -k "not kernels_equal_the_reference" $(COMPARING)

compatibility:  ## contract tests with the oldest and the newest dependencies that pyproject.toml allows; installs them
	$(PYTHON) .ci/compatibility.py

SANITIZER := .sanitizer
KERNELS := $(patsubst %,tests/test_%.py,attention_in_bits kernels layers neural_memory_kernels deltaformer kv_eviction)

$(SANITIZER): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps --ignore-requires-python --target $@ triton==3.8.0 ttsem==0.1.0

sanitize: $(SANITIZER)  ## kernels as they are compiled, executed on the CPU: accesses out of bounds, races, unwritten memory
	TRITON_INTERPRET=0 PYTHONPATH=$(SANITIZER):benchmarks $(BIN)/python -m ttsem.sanitize \
		pytest -q -p sanitizer $(KERNELS) -k "(triton or kernel) and not (compile or custom_ops or run_on or amd or model)"

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
