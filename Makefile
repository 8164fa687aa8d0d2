# `make demo` and `make test` do all of their own set-up and reuse it the next time.
.PHONY: demo test test-slow stateful faults soak check format serve

PY := .venv/bin/python

demo:
	@scripts/setup
	@$(PY) -m highwater demo

serve:
	@scripts/setup
	@$(PY) -m highwater serve

test:
	@scripts/setup for-tests
	@$(MAKE) --no-print-directory check
	@$(PY) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

# All that `make test` runs only a sample of; takes long.
test-slow:
	@scripts/setup for-tests
	@$(PY) -m pytest --slow -m slow --numprocesses 2 --no-loadscope-reorder

# Of the tests marked stateful `make test` does 1,500 steps. Takes 15 minutes.
stateful:
	@scripts/setup for-tests
	@HIGHWATER_STATEFUL_STEPS=200000 HIGHWATER_STATEFUL_RESULTS=benchmarks/results/stateful.md \
		$(PY) -m pytest -m stateful tests/engine/manager/test_books.py

# A failure at every place of a run, one after the other, of which `make test` tries a sample.
faults:
	@scripts/setup for-tests
	@grep -v '^| [a-z]' benchmarks/results/faults.md > .cache/faults.md; mv .cache/faults.md benchmarks/results/faults.md
	@HIGHWATER_FAULTS_RESULTS=benchmarks/results/faults.md $(PY) -m pytest --slow -m faults tests/engine

# Three workflows in turn, of which `make test` does 24 runs on each host. Takes half an hour.
soak:
	@scripts/setup for-tests
	@HIGHWATER_SOAK_RUNS=1000 HIGHWATER_SOAK_COMFYUI_RUNS=1000 HIGHWATER_SOAK_RESULTS=benchmarks/results/soak.md \
		$(PY) -m pytest -m soak tests/headless/test_soak.py tests/comfyui/test_soak.py

check:
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check --quiet .
	@mkdir -p .cache/types && ln -sfn ../.. .cache/types/highwater
	@cd .cache/types && MYPYPATH=. ../../.venv/bin/mypy --config-file ../../pyproject.toml -p highwater.memory

format:
	@.venv/bin/ruff check --fix --quiet .
	@.venv/bin/ruff format .
