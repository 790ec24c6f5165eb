# Every target sets up what it needs; `make quickstart` and `make test` work on a fresh clone.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
QUICKSTART := runs/quickstart
SENTENCE := This is [MASK], and I'm very [MASK] to see this.

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup quickstart lint format types test test-oldest docs campaign ext bench gpu dist wheel-check clean

setup: $(VENV)/.dev-installed

# A DAG of the package's own model, a small fine-tuning with its page, and a minute of pre-training. What was stopped goes on.
quickstart: $(BIN)/exlm
	$(BIN)/exlm inspect-dag "These [MASK] [MASK] very old." --out $(QUICKSTART)/dag
	if [ -f $(QUICKSTART)/boiling-points/recipe.yaml ]; then $(BIN)/exlm finetune --resume $(QUICKSTART)/boiling-points; \
	else $(BIN)/exlm finetune csv docs/examples/boiling_points.csv --label-columns boiling_point \
	  --split random --out $(QUICKSTART)/boiling-points; fi
	if [ -f $(QUICKSTART)/pretrained/recipe.yaml ]; then $(BIN)/exlm pretrain --resume $(QUICKSTART)/pretrained; \
	else $(BIN)/exlm pretrain --recipe quickstart-text --set train.max_steps=1000 --out $(QUICKSTART)/pretrained; fi
	$(BIN)/exlm inspect-dag "$(SENTENCE)" --checkpoint $(QUICKSTART)/pretrained --out $(QUICKSTART)/own-dag

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup
	$(BIN)/mypy

# Two workers of one thread each; on two cores a third makes it a sixth slower.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# The tests on the oldest packages that pyproject.toml allows, but for torch; those of the export need newer ones.
test-oldest:
	$(PYTHON) -m venv build/oldest
	grep '^torch' constraints.txt > build/oldest/constraints.txt
	sed -nE '/^dependencies/,/^]/{/"torch/!s/.*"(.+)>=(.+)".*/\1==\2/p}' pyproject.toml >> build/oldest/constraints.txt
	build/oldest/bin/pip install --quiet -c build/oldest/constraints.txt -e . pytest pytest-timeout pytest-xdist hypothesis
	OMP_NUM_THREADS=1 build/oldest/bin/python -m pytest -n 2 --ignore-glob '*export*'

# Two thousand damaged runs, foreign folders, kills and full disks; goes on where it was stopped.
campaign: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.campaign

# The documentation as a site in build/site; a warning is an error, and no page asks another host for scripts or images.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	! grep -rlE '<(script|link|img)[^>]+(src|href)="?https?://' build/site --include=*.html

ext: setup
	$(BIN)/exlm doctor --build

bench: ext
	for bench in alignment data train_step against_transformers; do \
	  $(BIN)/python benchmarks/bench_$$bench.py || exit 1; done

# Tests and times a CUDA device, with steps at the paper's size.
gpu: ext
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python benchmarks/bench_alignment.py --device cuda --backends native
	$(BIN)/python benchmarks/bench_train_step.py --device cuda --recipes ablation-exlm,text-base --batch-share 0.0625 \
	  --steps 5 --against hf

# dist/ gets the source distribution, and a wheel whose manylinux tag says how old a C library it runs on.
dist: setup
	rm -rf dist build/dist
	$(BIN)/python -m build --outdir build/dist
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/dist/*.whl
	mv build/dist/*.tar.gz dist/

# Installs the wheel into an environment of its own and runs it from an empty folder.
wheel-check: dist
	rm -rf build/wheel-check
	$(PYTHON) -m venv build/wheel-check/venv
	build/wheel-check/venv/bin/pip install --quiet -c constraints.txt dist/*.whl
	mkdir build/wheel-check/empty
	cd build/wheel-check/empty && PATH="$(CURDIR)/build/wheel-check/venv/bin:$$PATH" EXLM_CACHE_DIR=cache \
	  sh -eux -c 'python "$(CURDIR)/tests/check_prebuilt.py"; exlm --help; exlm recipes; \
	    exlm pretrain --recipe quickstart-text --out run --set train.max_steps=20 --set data.bundled_rows=2000; \
	    exlm inspect-dag "This is [MASK]." --checkpoint run --out dag; ls run dag'

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# constraints.txt pins torch: see the note in it
$(BIN)/exlm: | $(BIN)/python
	$(BIN)/pip install --quiet -c constraints.txt -e .

$(VENV)/.dev-installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev,docs,hf,onnx]"
	touch $@
