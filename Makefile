# Targets: setup build run test test-full test-torch test-hosts test-peers docs bench bench-cpu wheel release clean. Each
# makes what it needs first; see CONTRIBUTING.md.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: setup build run test test-full test-torch test-hosts test-peers docs bench bench-cpu wheel release clean

STAMPS := build/.stamps
VENV := .venv/bin
export PATH := $(CURDIR)/$(VENV):$(PATH)

SOURCES := $(shell find meson.build meson.options pyproject.toml README.md docs/man bench/counts \
	include src cli examples python tests tools -type f -not -path '*/__pycache__/*' 2>/dev/null)

build: $(STAMPS)/build $(STAMPS)/package
	@:

setup: $(STAMPS)/setup
	@:

# .venv is named so that removing it is enough to make it anew.
$(STAMPS)/setup: tools/setup.sh $(if $(wildcard $(VENV)/python),,no-venv)
	@mkdir -p $(@D)
	@tools/setup.sh
	@touch $@

.PHONY: no-venv

$(STAMPS)/build: $(STAMPS)/setup $(SOURCES)
	@test -f build/lib/build.ninja || meson setup build/lib
	@echo "building the library, the tool and the tests in build/lib"
	@meson compile -C build/lib --ninja-args=--quiet
	@touch $@

$(STAMPS)/package: $(STAMPS)/setup $(filter-out tests/% examples/% bench/%,$(SOURCES))
	@echo "building the Python package and installing it into .venv"
	@python -m pip install --quiet --no-deps --no-build-isolation --force-reinstall \
		--config-settings=build-dir=build/package .
	@touch $@

run: build
	@examples/run.sh

test: build
	@python tests/run.py

test-full: build wheel
	@python tests/run.py --full

# make test-torch TORCH=torch==2.4.1; TESTS holds arguments of pytest, in place of the whole suite.
test-torch: build wheel
	@TORCH="$(TORCH)" tools/test_torch.sh $(TESTS)

# All that is tried against the released diffusers, transformers, PEFT and accelerate, which setup installs, and TRL and
# Lightning, which are installed here; `make test` tries a part of that. STH_TEST_DEVICE=cuda:0 make test-hosts runs on
# a card.
test-hosts: build
	@tools/setup.sh datasets lightning trl
	@STH_TEST_FULL=1 python -m pytest -q -n auto tests/python/field/test_gg_hosts.py \
		tests/python/field/test_gg_pipelines.py tests/python/field/test_gg_matrix.py \
		tests/python/field/test_gg_language.py tests/python/field/test_z_meta.py tests/python/test_pipeline.py \
		tests/python/test_trainers.py tests/python/test_from_pretrained.py tests/python/test_accelerate.py \
		tests/python/test_lightning.py tests/python/test_trl.py

# PEERS holds checkouts of other projects, whose tests run on stagehand: make test-peers PEERS=/path
test-peers: build
	@PEERS="$(PEERS)" python tests/peers/run.py

# The documents as a site, build/site/index.html; a warning is an error. DOCS_VERSION names a version, such as a tag.
docs: build
	@tools/setup.sh $$(grep -v '^#' docs/requirements.txt)
	@python -m sphinx -E -W --keep-going -q -b html -d build/doctrees docs build/site
	@echo "the site is build/site/index.html"

bench-cpu: build
	@python bench/counts/counts.py all build/lib/bench/counts/counts-work
	@python bench/counts/training.py build/lib/bench/counts/counts-marks.so

# BENCH holds arguments of bench/run.py: make bench BENCH="--only lora,full"
bench: build
	@python bench/run.py $(BENCH)

wheel: $(STAMPS)/setup
	@tools/wheel.sh

# What is published: the source distribution of HEAD, a wheel for glibc 2.28 and newer, their checksums.
release: $(STAMPS)/setup
	@tools/setup.sh ziglang
	@tools/release.sh

clean:
	rm -rf build dist
