PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

export OMP_NUM_THREADS ?= 2

.PHONY: install test check demo format bench-quick clean

install: $(STAMP)

# --no-build-isolation: the native op is built against the Paddle that is installed here.
$(STAMP): pyproject.toml setup.py
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip "setuptools<81" wheel
	$(PY) -m pip install --quiet "paddlepaddle==3.3.1"
	$(PY) -m pip install --quiet --no-build-isolation -e ".[ernie,cli,checkpoint,test,dev]"
	touch $@

check: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

test: check
	$(PY) -m pytest -m "not slow"

demo: $(STAMP)
	$(PY) examples/ernie_chnsenticorp/train.py

# A minute's look at whether the private step got slower; not part of the tests.
bench-quick: $(STAMP)
	$(PY) benchmarks/step.py --quick

clean:
	rm -rf build dist *.egg-info

include kernels.mk
