# `make demo` shows what autotune does, `make test` runs the tests, `make lint` the style, type and import rules.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder

# constraints.txt holds the versions that the tests ran with.
INSTALL = $(VENV)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint clean

demo: $(VENV)/.installed
	rm -rf autotune-study/demo
	$(VENV)/bin/autotune search examples/quickstart.py --budget 110s --study autotune-study/demo

test: $(VENV)/.installed-dev
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis autotune-study/demo
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# A stamp that is newer than both files says that the installation is up to date. The dev stamp covers the plain one.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e ".[dev]"
	touch $@ $(VENV)/.installed
