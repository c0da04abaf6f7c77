# The commands that developers and CI run. Each target prints what it runs.
#
# Everything is built in one profile, release, over the whole workspace, so that
# RocksDB (ten to twenty minutes from its source) is compiled once for all
# targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

CARGO ?= cargo
# Where cargo builds; CI sets it to a folder that outlives the clone.
TARGET_DIR := $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),target)
RINGMAIN := $(TARGET_DIR)/release/ringmain

# The same for every command: another selection of packages or another profile
# would compile RocksDB a second time.
ALL := --workspace --release --locked

# How much of the long tests: which deaths (`all`, or `i/n`), how long, which seeds.
SLICE ?= all
SECONDS ?= 60
SEEDS ?= 20000
SEED ?=
LONG := RINGMAIN_SLICE=$(SLICE) RINGMAIN_SECONDS=$(SECONDS) $(if $(SEED),RINGMAIN_SEED=$(SEED))

# Arguments of `make demo` and of the program of `make bench`.
DEMO_ARGS ?=
BENCH_ARGS ?= all

.PHONY: help setup build demo test death soak simulate fuzz loom miri bench lint

help: ## Show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/\1\t\2/p' Makefile | awk -F '\t' '{ printf "make %-8s  %s\n", $$1, $$2 }'

setup: ## Look for what a build needs, and install what is missing where that can be done
	bash scripts/setup.sh

build: setup ## Build everything
	$(CARGO) build $(ALL)

demo: build ## See it at work: processes are killed, and what arrived is counted (DEMO_ARGS=...)
	$(RINGMAIN) demo $(DEMO_ARGS)

test: setup ## Run all tests, those under loom too
	$(CARGO) test $(ALL)
	$(MAKE) loom

death: setup ## Kill clients at every instruction, the broker at every crash point (SLICE=i/n)
	$(LONG) $(CARGO) test $(ALL) --test death
	$(LONG) $(CARGO) test $(ALL) --lib -q crash:: -- --nocapture

soak: setup ## Kill and stop everybody at random (SECONDS=, SEED=)
	$(LONG) $(CARGO) test $(ALL) --test soak -q random -- --nocapture

simulate: setup ## The broker's state machine under clocks, stores and deaths of a seed (SEEDS=, SEED=)
	RINGMAIN_CASES=$(SEEDS) $(if $(SEED),RINGMAIN_SEED=$(SEED)) $(CARGO) test $(ALL) --lib -q lost -- --nocapture

fuzz: setup ## Hostile bytes in shared memory and on the control socket (SECONDS=, SEED=)
	$(LONG) $(CARGO) test $(ALL) --test hostile -q harm -- --nocapture

loom: ## Examine the ring and the waiting in every order that the memory model allows
	RUSTFLAGS="--cfg loom" $(CARGO) test --release --locked -p ringmain-ring --test 'loom_*' --target-dir $(TARGET_DIR)/loom

miri: ## Look for undefined behaviour in the ring; needs a toolchain that has miri
	MIRIFLAGS=-Zmiri-disable-isolation $(CARGO) +nightly miri test --locked -p ringmain-ring --lib --target-dir $(TARGET_DIR)/miri

bench: setup ## Measure: the ring alone, then processes with a broker (BENCH_ARGS=...)
	$(CARGO) bench --locked --workspace --bench ring
	$(CARGO) build $(ALL)
	$(TARGET_DIR)/release/ringmain-bench $(BENCH_ARGS)

lint: setup ## Check the format, clippy and the documentation; warnings are errors
	$(CARGO) fmt --all --check
	$(CARGO) clippy $(ALL) --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc $(ALL) --no-deps
