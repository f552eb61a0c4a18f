# The commands of README.md. On a fresh machine they need Python 3.11 or newer and a C++ compiler, nothing else.
#   VENV=dir     where the environment lives (.venv); VENV= uses the python on PATH as it is and installs nothing
#   PYTHON=exe   the interpreter the environment is made from
#   WORKERS=n    processes of the test suite; four keep two cores busy, since many tests wait for others' processes
SHELL := bash
VENV ?= .venv
RUN_IN := $(if $(VENV),PATH="$(if $(filter /%,$(VENV)),$(VENV),$(CURDIR)/$(VENV))/bin:$$PATH")
WORKERS ?= 4
PYTEST_ARGS ?=
export ONLY
# of `make quickstart`: CORPUS="path …", OUT, STEPS, RANKS, SEQ_LEN, VOCAB, EXTRA="section.key=value …"
QUICKSTART = $(if $(CORPUS),--input $(CORPUS)) $(if $(OUT),--output "$(OUT)") $(if $(STEPS),--steps $(STEPS)) \
  $(if $(RANKS),--ranks $(RANKS)) $(if $(SEQ_LEN),--seq-len $(SEQ_LEN)) $(if $(VOCAB),--vocab-size $(VOCAB))

.PHONY: help venv wheel sdist quickstart test lint format docs soak bench clean

help:
	@echo "make quickstart [CORPUS=\"path ...\"]  shards from real text, train, stop, resume, evaluate"
	@echo "make test [PYTEST_ARGS=\"...\"]        lint, types and the default tests"
	@echo "make format                          layout and what the linter can mend by itself"
	@echo "make docs                            the pages of docs/ as a site in build/docs"
	@echo "make wheel [MEGABERT_CUDA=0]         dist/*.whl with the CUDA kernels, or without them"
	@echo "make sdist                           dist/*.tar.gz, from which the wheel and the environment are built"
	@echo "make lint | soak | bench | venv | clean"

venv:
ifneq ($(VENV),)
	@VENV="$(VENV)" PYTHON="$(PYTHON)" bash launch/venv.sh
endif

# For sm_80, sm_89, sm_90, sm_100 and newer by PTX; TORCH_CUDA_ARCH_LIST names others. MEGABERT_CUDA=0: for CPUs alone.
wheel: export MEGABERT_CUDA ?= 1
wheel: venv
	$(RUN_IN) python -m pip --disable-pip-version-check wheel --quiet --no-build-isolation --no-deps -w dist .

sdist: venv
	$(RUN_IN) python setup.py --quiet sdist

quickstart: venv
	@$(RUN_IN) python -m megabert quickstart $(EXTRA) $(QUICKSTART)

lint: venv
	$(RUN_IN) ruff check .
	$(RUN_IN) ruff format --check .
	$(RUN_IN) mypy

format: venv
	$(RUN_IN) ruff check --fix .
	$(RUN_IN) ruff format .

docs: venv
	$(RUN_IN) python -m sphinx --fail-on-warning --keep-going --quiet docs build/docs
	@echo "build/docs/index.html"

# One thread a process: two would wait for each other on cores that other processes take. Byte code is kept: hundreds of tests start
# Python, and where the environment forbids it each compiles the project again.
test: lint
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(RUN_IN) python -m pytest -q -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

soak: venv
	PYTHONDONTWRITEBYTECODE= $(RUN_IN) python -m pytest --durations=20 -m "slow or soak" $(PYTEST_ARGS)

bench: venv
	$(RUN_IN) bash launch/bench.sh

clean:
	rm -rf build dist megabert.egg-info megabert/_native.abi3.so .pytest_cache .mypy_cache .ruff_cache
