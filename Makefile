# Both commands set themselves up on a fresh machine: a virtual environment in .venv with pinned dependencies.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: run test lint bench oracle extras signatures kunlun sglang-cpu sglang-cpu-0.5.16 sglang-cpu-0.5.23 clean

run: $(VENV)/run.stamp
	$(BIN)/kpolicy run $(ARGS)

# Hundreds of tests start Python anew: without compiled files each start would compile kpolicy, 0.8 s of a core.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/test.stamp
	$(BIN)/python -m pytest -n auto --dist loadgroup --max-worker-restart 0 $(ARGS)

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/test.stamp
	$(BIN)/python -m benchmarks.decide $(ARGS)

# The replicas against the real code of vLLM and SGLang, out of their wheels (650 MB); nothing of them is installed.
ORACLE := .cache/oracle
oracle: $(VENV)/test.stamp
	mkdir -p $(ORACLE)
	for package in vllm==0.23.0 vllm==0.33.0 sglang==0.5.16 sglang==0.5.23; do \
	    ls $(ORACLE)/$$(echo $$package | sed 's/==/-/')* >/dev/null 2>&1 || \
	    $(BIN)/python -m pip download --quiet --no-deps --dest $(ORACLE) $$package; done
	ls $(ORACLE)/vllm_ascend-0.23.0* >/dev/null 2>&1 || $(BIN)/python -m pip download --quiet --no-deps \
	    --dest $(ORACLE) --python-version 3.11 --platform manylinux_2_34_x86_64 --only-binary=:all: vllm-ascend==0.23.0
	KPOLICY_ORACLE=$(ORACLE) $(BIN)/python -m pytest -n auto -m oracle $(ARGS)

# Sweeps on a local Ray, and the measured tables of aiconfigurator-core: packages that the tests do without (700 MB
# installed).
extras: $(VENV)/test.stamp
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[ray,aiconfigurator]'
	$(BIN)/python -m pytest tests/simulate/test_sweep.py tests/simulate/test_aiconfigurator.py tests/cli/test_sweep.py \
	    tests/cli/test_simulate.py $(ARGS)

# What is pretended of torch_npu, and what is wrapped of vLLM-Ascend, against the published wheels (71 MB), whose sources
# are read and not imported.
SIGNATURES := .cache/signatures
NPU_WHEEL = $(SIGNATURES)/torch_npu-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl
ASCEND_WHEEL = $(SIGNATURES)/vllm_ascend-0.23.0-cp311-cp311-manylinux_2_34_x86_64.whl
signatures: $(VENV)/test.stamp
	mkdir -p $(SIGNATURES)
	ls $(ASCEND_WHEEL) >/dev/null 2>&1 || $(BIN)/python -m pip download --quiet --no-deps --dest $(SIGNATURES) \
	    --python-version 3.11 --platform manylinux_2_34_x86_64 --only-binary=:all: vllm-ascend==0.23.0
	ls $(NPU_WHEEL) >/dev/null 2>&1 || $(BIN)/python -m pip download --quiet --no-deps --dest $(SIGNATURES) \
	    --python-version 3.11 --platform manylinux_2_28_x86_64 --only-binary=:all: torch_npu==2.13.0
	KPOLICY_TORCH_NPU_WHEEL=$(CURDIR)/$(NPU_WHEEL) KPOLICY_VLLM_ASCEND_WHEEL=$(CURDIR)/$(ASCEND_WHEEL) \
	    $(BIN)/python -m pytest tests/executors_ascend/test_signatures.py tests/integrations/vllm/test_ascend.py $(ARGS)

# What is attached under vLLM-Kunlun, in the first runners of the vLLMs it is made for (1.5 GB), and its published package.
KUNLUN_WHEEL = $(SIGNATURES)/vllm_kunlun-0.11.1-py3-none-any.whl
kunlun: $(VENV)/test.stamp
	mkdir -p $(ORACLE) $(SIGNATURES)
	for package in vllm==0.11.0 vllm==0.15.1 vllm==0.23.0 vllm==0.25.1; do \
	    ls $(ORACLE)/$$(echo $$package | sed 's/==/-/')-* >/dev/null 2>&1 || \
	    $(BIN)/python -m pip download --quiet --no-deps --dest $(ORACLE) $$package; done
	ls $(KUNLUN_WHEEL) >/dev/null 2>&1 || \
	    $(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --dest $(SIGNATURES) vllm-kunlun==0.11.1
	KPOLICY_ORACLE=$(CURDIR)/$(ORACLE) KPOLICY_VLLM_KUNLUN_WHEEL=$(CURDIR)/$(KUNLUN_WHEEL) \
	    $(BIN)/python -m pytest tests/integrations/vllm/test_kunlun_dispatch.py -m "oracle or not oracle" $(ARGS)

# The whole SGLang of both versions where no GPU is, each with what it imports there in an environment of its own (2.7 GB
# each; Python 3.11 or later). 0.5.16 also serves requests through its real scheduler. A quarter of an hour.
SGLANG_CPU := .cache/sglang-cpu
SGLANG_NEEDS := tests/integrations/sglang/cpu
sglang-cpu: sglang-cpu-0.5.16 sglang-cpu-0.5.23
sglang-cpu-0.5.16: export KPOLICY_SGLANG_CPU := 1
sglang-cpu-0.5.16 sglang-cpu-0.5.23: sglang-cpu-%: $(SGLANG_CPU)/%/test.stamp
	PYTHONPATH=$(CURDIR)/$(SGLANG_NEEDS) \
	    $(SGLANG_CPU)/$*/bin/python -m pytest -rs tests/integrations/sglang/test_real_package.py $(ARGS)

$(SGLANG_CPU)/%/test.stamp: $(SGLANG_NEEDS)/%.txt $(SGLANG_NEEDS)/imports.txt $(SGLANG_NEEDS)/pins.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --constraint constraints.txt pip
	$(@D)/bin/python -m pip install --quiet --requirement $<
	$(@D)/bin/python -m pip install --quiet --no-deps sglang==$*
	$(@D)/bin/python -m pip install --quiet --constraint constraints.txt --editable . \
	    --editable integrations/kpolicy_sglang
	touch $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt pip

# A run imports a small part of torch and transformers; compiling all of them is half of the set-up's work.
$(VENV)/run.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "setting up $(VENV): torch and transformers, over a gigabyte"
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[models]'
	touch $@

$(VENV)/test.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,models]' \
	    --editable integrations/kpolicy_vllm
	touch $@ $(VENV)/run.stamp

clean:
	rm -rf $(VENV) build dist *.egg-info
