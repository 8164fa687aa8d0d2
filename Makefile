# `make demo` and `make test` do all of their own set-up and reuse it the next time.
.PHONY: demo test test-slow check format serve

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

check:
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check --quiet .
	@mkdir -p .cache/types && ln -sfn ../.. .cache/types/highwater
	@cd .cache/types && MYPYPATH=. ../../.venv/bin/mypy --config-file ../../pyproject.toml -p highwater.memory

format:
	@.venv/bin/ruff check --fix --quiet .
	@.venv/bin/ruff format .
