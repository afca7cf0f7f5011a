# make demo: optimise AlexNet on real photographs · make test: lint, types, import contracts, tests · make venv: .venv alone
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: venv demo test lint types contracts check gpu-test sanitize clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch torchvision
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

demo: venv
	$(BIN)/python examples/demo.py

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: venv
	$(BIN)/basedpyright

contracts: venv
	$(BIN)/lint-imports

test: lint types contracts
	$(BIN)/python -m pytest -n 2 --dist loadgroup tests

gpu-test:
	$(PYTHON) -m pytest tests/gpu -m gpu

clean:
	rm -rf $(VENV) dist build
