# make demo   compare topologies on the built-in corpus (minutes on two cores) and write a report
# make test   lint, types and tests
# make laws   the tests with every combination of a topology and a norm
# Both set up a virtual environment in .venv first; they need python3 (>= 3.11), make and a package index.

PYTHON ?= python3
BIN := .venv/bin
VENV := .venv/pyvenv.cfg
TORCH := .venv/torch
LARGE := .venv/large
READY := .venv/ready
TIMM := .timm/ready
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
# Tests start hundreds of processes, which would each compile what they import where the environment forbids bytecode.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test laws check vision suite docs pages peers registers rewire-table clean

demo: $(READY)
	$(BIN)/siamesenorm demo

test:
	$(MAKE) --no-print-directory -j 2 $(READY) $(TIMM)
	$(MAKE) --no-print-directory -j 3 check vision suite

# Every combination of a topology and a norm, where `make test` runs pairs.
laws: $(READY) $(TIMM)
	OMP_NUM_THREADS=1 PYTHONPATH=.timm $(BIN)/python -m pytest tests/vision --laws
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --laws

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

suite: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

vision: $(READY) $(TIMM)
	OMP_NUM_THREADS=1 PYTHONPATH=.timm $(BIN)/python -m pytest tests/vision

docs: $(READY)
	$(BIN)/siamesenorm explain --markdown > docs/topologies.md

pages: $(READY)
	$(BIN)/python benchmarks/pages.py $(shell grep -l '<!-- table ' docs/*.md)
	$(BIN)/python benchmarks/report_tables.py $(shell grep -l '<!-- report ' docs/*.md)

peers: $(READY)
	$(INSTALL) -e '.[bench]'
	$(BIN)/python benchmarks/peers.py

registers: $(READY)
	$(BIN)/python benchmarks/registers.py

rewire-table: $(READY) $(TIMM)
	$(BIN)/python benchmarks/rewire_table.py benchmarks/rewire.json
	PYTHONPATH=.timm $(BIN)/python benchmarks/rewire_table.py benchmarks/rewire.json timm
	$(BIN)/python benchmarks/pages.py docs/rewire.md

$(VENV):
	$(PYTHON) -m venv .venv

# The constraints come first: without them an index may bring a torch with gigabytes of CUDA. Bytecode is compiled when
# a module is first imported: most never are.
$(TORCH): $(VENV) constraints.txt
	$(INSTALL) torch
	touch $(TORCH)

# Large packages, which another process unpacks meanwhile.
$(LARGE): $(VENV) constraints.txt
	$(INSTALL) --no-deps "triton; sys_platform == 'linux'" transformers diffusers pyarrow
	touch $(LARGE)

$(READY): $(TORCH) $(LARGE) pyproject.toml constraints.txt
	$(INSTALL) -e '.[lab,diffusion,dev]'
	touch $(READY)

# Beside a torch for the CPU no torchvision of the index imports, and transformers with it: timm, which needs one, and
# torchvision live in a directory of their own, on the path of their own tests alone.
$(TIMM): $(VENV) constraints.txt
	rm -rf .timm
	$(INSTALL) --no-deps --target .timm timm torchvision
	touch $(TIMM)

clean:
	rm -rf .venv .timm build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
