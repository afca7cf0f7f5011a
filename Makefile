# make demo: optimise AlexNet on real photographs · make test: lint, types, import contracts, tests · make venv: .venv alone
PYTHON ?= python3
JOBS ?= 4
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: venv demo test test-long lint types types-src types-basedpyright types-mypy contracts docs reference gpu-test fuzz sanitize clean

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

types: types-src types-basedpyright types-mypy

types-src: venv
	$(BIN)/basedpyright

# A user's script, by the two checkers that users have.
types-basedpyright: venv
	$(BIN)/basedpyright -p tests/typing

types-mypy: venv
	$(BIN)/mypy --config-file tests/typing/mypy.ini

contracts: venv
	$(BIN)/lint-imports

# The site, in build/site. Nothing is fetched; a broken link or anchor fails.
docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The pages' parts that the code says: the command line, the list of caches.
reference: venv
	$(BIN)/python docs/_site/generate.py

# Two processes at a time, of one thread each: more would wait for each other's cores.
test: venv
	$(MAKE) -j 2 types-src docs types-mypy types-basedpyright contracts lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m 'not long' tests

# What `make test` leaves out: the same proofs on more nets.
test-long: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m long tests

gpu-test:
	$(PYTHON) bench/gpu_tests/gpu_tests.py --folder build/gpu-tests

# A million damaged files for every loader: nothing but a ConvoyError, no hanging, little memory. Failing files are kept.
fuzz: venv
	$(BIN)/python -m tests.fuzz.mutate_files --count 1000000 --jobs 2

# Every kernel of ours under compute-sanitizer's four tools, JOBS processes at a time.
sanitize:
	$(PYTHON) -m tests.gpu.sanitize --jobs $(JOBS)

clean:
	rm -rf $(VENV) dist build
