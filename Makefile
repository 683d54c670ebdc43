# Two commands for a newcomer: `make demo` and `make test`. Each makes its own environment: that of
# the demo has what the package itself needs, that of the tests every tool and every extra too.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := .venv-demo
INSTALL = -m pip install --quiet --no-compile --disable-pip-version-check --editable
CORES = $(shell $(PYTHON) -c 'import os; print(os.cpu_count() or 1)')
# more than there are cores: tests on real deployments, browsers and killed processes wait a lot
WORKERS = $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) + 3)')

# Packages are installed uncompiled; each module is compiled once, when it is first imported. Where
# this is set every process would compile them all again: ten seconds for each of hundreds.
unexport PYTHONDONTWRITEBYTECODE

# tests of linear algebra and of sums over rows, without those that draw, load or wait for long
NUMERIC = tests/numerics tests/selection tests/calibration --ignore-glob='*_large.py' \
  $(addprefix tests/lab/theory/test_,bound.py objective.py sensitivity_floor.py) \
  $(addprefix tests/evaluation/test_,balance.py evaluate.py jackknife.py means.py two_phase.py) \
  $(addprefix tests/weighting/test_,calibrated_weights.py functions.py guards.py online.py) \
  tests/weighting/test_soft_calibration.py tests/combining
# of those, tests of classifiers, histories and saved states, which hardly add: left to `make matrix`
SUMLESS = $(addprefix --ignore=tests/selection/test_,cross_fitting.py participation_state.py \
  propensity_model.py reply_history.py sklearn_checks.py)
SEED ?= 1729

.PHONY: demo test lint types unit portable docs kernels bench clean \
  matrix numeric lowest audit-packages fuzz faults s3

demo: $(DEMO)/.installed
	$(DEMO)/bin/fedipw reproduce --out demo
	@echo
	@echo "figure: $(CURDIR)/demo/figure1.png"
	@echo "page:   $(CURDIR)/demo/index.html"

test: $(STAMP)
	$(MAKE) --jobs 4 lint types docs kernels  # one core each; tests use them all
	$(MAKE) unit
	$(MAKE) portable

$(STAMP) $(DEMO)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("fedipw needs Python 3.11 or newer, not " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(INSTALL) '.$(if $(filter $(STAMP),$@),[dev])'
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: $(STAMP)
	$(BIN)/mypy

unit: export FEDIPW_ARTIFACTS ?= $(CURDIR)/artifacts
unit: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST)

# Another processor adds in another order: the numbers once more, with the linear algebra of an old
# one (no AVX, no fused multiply-add) and other examples.
portable: export OPENBLAS_CORETYPE = Prescott
portable: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(CORES) --hypothesis-seed $(SEED) $(NUMERIC) $(SUMLESS)

docs: $(STAMP)
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "docs: $(CURDIR)/docs/_build/html/index.html"

kernels: $(STAMP)  # compiled once, before several processes would do it at the same time; so are tests
	$(BIN)/python -c "from fedipw.lab.scenario import Scenario as S; S(rounds=12, methods=('fedipw', 'efficient', 'scaffold')).simulation().advance(12)"
	-@$(BIN)/python -m pytest --collect-only -qq > /dev/null  # what is wrong with one is told by its run

bench: $(STAMP)
	$(BIN)/python -m benchmarks.simulator

clean:
	rm -rf $(VENV) $(DEMO) artifacts demo dist docs/_build

# The numbers under the linear algebra of other processors, one and two threads, and three seeds of
# Hypothesis: 30 cells, most of an hour on two cores. `make portable` is one odd cell of it.
matrix: $(STAMP)
	$(BIN)/python -m benchmarks.matrix

numeric:  # which tests those are
	@echo $(subst ',,$(NUMERIC))

# The lowest versions that pyproject.toml allows, in an environment of their own.
lowest:
	$(PYTHON) -m benchmarks.lowest --venv $(VENV)-lowest

# Known vulnerabilities of what is installed; needs the network and pip-audit (pip install pip-audit).
audit-packages: $(STAMP)
	@if command -v pip-audit > /dev/null; then pip-audit --strict --path $$($(BIN)/python -c \
	  'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	else echo "pip-audit is not installed: pip install pip-audit"; exit 1; fi

fuzz: $(STAMP)
	$(BIN)/python -m benchmarks.fuzz --cases 20000 --out benchmarks/results/fuzz.json

faults: $(STAMP)
	$(BIN)/python -m benchmarks.faults

# Commands on an S3 interface on this machine, in an environment of their own: its packages take long
# to resolve and want an older dateutil.
s3:
	$(PYTHON) -m venv $(VENV)-s3
	$(VENV)-s3/bin/python $(INSTALL) '.[remote]' pytest hypothesis s3fs 'moto[s3]' flask flask-cors
	$(VENV)-s3/bin/python -m pytest tests/cli/test_s3.py
