# Every command sets itself up: a virtual environment in .venv, made anew when the packaging changes.
PYTHON ?= python3.11
VENV := .venv
RUN := JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(VENV)/bin/python -m
INSTALLED := $(VENV)/.installed

NEWEST := .venv-newest
NEWEST_PYTHON ?= python3.13

.PHONY: benchmark test test-newest test-gpu lint types clean

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[triton,transformers,tools,examples,test,lint]'
	touch $@

# Without torch: the tests that need it are skipped.
$(NEWEST)/.installed: pyproject.toml constraints-newest.txt
	$(NEWEST_PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-newest.txt -e '.[examples,test]'
	touch $@

benchmark: $(INSTALLED)
	$(RUN) tools.benchmark $(FLAGS)

test: $(INSTALLED)
	$(RUN) pytest -n auto -m 'not gpu' $(FLAGS)

test-newest: $(NEWEST)/.installed
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(NEWEST)/bin/python -m pytest -n auto -m 'not gpu' $(FLAGS)

# On a machine with an NVIDIA GPU and its own jax[cuda]: the environment's python, not .venv's.
test-gpu:
	XLA_PYTHON_CLIENT_PREALLOCATE=false python3 -m pytest -m gpu $(FLAGS)

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(INSTALLED)
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) $(NEWEST) build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
