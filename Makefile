# The course's commands; `make` alone lists them. GNU make 3.81 (macOS) or newer.
#   make lab PYTHON=/path/to/python          another Python for .venv (3.10 or newer)
#   make lab VENV_ARGS=--system-site-packages   use a torch that is already installed
#   make test ARGS="tests/test_cli.py -x"    arguments for pytest
VENV ?= .venv
VENV_ARGS ?=
PYTHON ?=
WORKERS ?= 2
ARGS ?=
NOTEBOOK ?=

PY = $(VENV)/bin/python
PIP = $(PY) -m pip --disable-pip-version-check
RUN = $(PY) -m minillm.cli
LAB = $(VENV)-browser
CODE = minillm notebooks solutions tests
TESTED = 13

.PHONY: help lab tour test pull grade build browser clean

help:
	@echo "make lab     open the course in JupyterLab"
	@echo "make tour    the ladder of techniques, measured on this machine"
	@echo "make grade   your progress through the exercises; NOTEBOOK=02 for one of them"
	@echo "make pull    fetch smollm2-135m, the small real model (once)"
	@echo "make test    all tests; ARGS=... goes to pytest"
	@echo "make build   build notebooks from their masters (authors)"
	@echo "make clean   remove environments and caches; what you wrote stays"

lab: $(VENV)/.lab
	@$(RUN) lab

tour: $(VENV)/.base
	@$(RUN) pull smollm2-135m >/dev/null 2>&1 || echo "smollm2-135m could not be fetched (make pull says why); the tour runs on tiny"
	@$(RUN) tour

pull: $(VENV)/.base
	@$(RUN) pull smollm2-135m

grade: $(VENV)/.base
	@$(RUN) grade $(NOTEBOOK)

build: $(VENV)/.dev
	$(PY) -m minillm.lab.build $(ARGS)

# Two workers with one thread each (tests/conftest.py) fill two cores. The notebooks of a chapter run in processes of
# their own, so tests may be dealt one by one: worksteal keeps both workers busy to the end.
test: $(VENV)/.dev browser
	$(PY) -m ruff check $(CODE)
	$(PY) -m ruff format --check $(CODE)
	MINILLM_FAST=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

clean:
	rm -rf $(VENV) $(LAB) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find minillm tests notebooks solutions exercises -name __pycache__ -prune -exec rm -rf {} +

# ---- environments: a stamp file says what is installed, and is out of date when pyproject.toml is newer

$(VENV)/.base: pyproject.toml $(VENV)/.made
	$(PIP) install -e .
	@touch $@

$(VENV)/.lab: pyproject.toml $(VENV)/.made
	$(PIP) install -e ".[lab]"
	@touch $(VENV)/.base $@

$(VENV)/.dev: pyproject.toml $(VENV)/.made
	$(PIP) install -e ".[dev]"
	@touch $(VENV)/.base $@

# A virtual environment whose Python has gone (an upgrade of the system) is made again.
GONE := $(shell test -x $(PY) || rm -f $(VENV)/.made)

# One that is already there is kept. Otherwise: the first Python that the course has been run on, else a newer one.
$(VENV)/.made:
	@if ! { $(PY) -m pip --version || $(PY) -m ensurepip; } >/dev/null 2>&1; then \
	  tried="$(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.10)"; found=; \
	  for newest in $(TESTED) 99; do \
	    for python in $$tried; do \
	      test -z "$$found" || break; \
	      "$$python" -c "import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, $$newest))" \
	        >/dev/null 2>&1 && found=$$python; \
	    done; \
	  done; \
	  if test -z "$$found"; then \
	    echo "minillm needs Python 3.10 or newer with its venv module; tried: $$tried." >&2; \
	    echo "Debian, Ubuntu, WSL: sudo apt install python3-venv. macOS: brew install python@3.$(TESTED)." >&2; \
	    echo "Or name one: make lab PYTHON=/path/to/python" >&2; \
	    exit 1; \
	  fi; \
	  echo "$(VENV): made with $$("$$found" --version)"; \
	  "$$found" -m venv --clear $(VENV_ARGS) $(VENV) || exit 1; \
	  $(PIP) install --quiet --upgrade pip || true; \
	fi
	@if test "$$(uname -s)" = Linux && ! command -v nvidia-smi >/dev/null && ! $(PY) -c "import torch" 2>/dev/null; then \
	  echo "No NVIDIA GPU seen. pip may still choose PyTorch's CUDA build (several GB). For the small CPU build,"; \
	  echo "set PIP_EXTRA_INDEX_URL to the CPU address that PyTorch's Get Started page shows, and run make again."; \
	fi
	@touch $@

# The browser test's JupyterLab has an environment of its own, without torch: beside it `import nbformat`, which every
# graded notebook pays for, takes ten times as long. Its kernels run in $(VENV).
browser: $(VENV)/.dev
	@if $(PY) tests/chromium.py >/dev/null; then $(MAKE) --no-print-directory $(LAB)/.made; \
	else echo "no Chromium or Chrome on this machine: the browser test is skipped"; fi

$(LAB)/.made:
	$(PY) -m venv --clear --without-pip $(LAB)
	$(PIP) --python $(LAB)/bin/python install "jupyterlab>=4.2" "jupyterlab_widgets>=3.0"
	@touch $@
