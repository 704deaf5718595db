# Every target sets up what it needs first (scripts/setup.sh). `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
JOBS ?= $(shell nproc)
export PYTHON JOBS

# Tools the system lacks come from .venv; nvcc is often installed off the PATH; ccache is used where it is present.
export PATH := $(CURDIR)/.venv/bin:$(PATH):/usr/local/cuda/bin
ifneq ($(shell command -v ccache),)
export CMAKE_C_COMPILER_LAUNCHER := ccache
export CMAKE_CXX_COMPILER_LAUNCHER := ccache
export CMAKE_CUDA_COMPILER_LAUNCHER := ccache
endif

.PHONY: help
help:  ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/  make \1|\2/' | column -t -s '|'

.PHONY: run
run:  ## Build the CPU part, rerun the paper's test-time regression, and make a page of what happened
	@scripts/setup.sh run
	@cmake --preset cpu --log-level=WARNING
	@cmake --build --preset cpu -j $(JOBS) -t lla_cli
	@build/cpu/bin/lla reproduce regression --quick --out out/regression
	@build/cpu/bin/lla report out/regression

.PHONY: check
check:  ## Build the CPU part and compare it with the fp64 reference on this machine
	@scripts/setup.sh run
	@cmake --preset cpu --log-level=WARNING
	@cmake --build --preset cpu -j $(JOBS) -t lla_cli
	@build/cpu/bin/lla check --quick

.PHONY: browser-test
browser-test: run  ## Load the page in headless Chromium: phone and desktop, light and dark
	@scripts/setup.sh browser
	@tests/reproduce/browser_test.sh out/regression/index.html

.PHONY: build
build:  ## Build everything this machine can build
	@scripts/setup.sh test
	@cmake --preset release
	@cmake --build --preset release -j $(JOBS)

.PHONY: test
test:  ## Build and run every test, again under ASan + UBSan and TSan, and the CUDA kernels on an emulated GPU
	@scripts/setup.sh test
	@scripts/test.sh

.PHONY: test-gpu
test-gpu: build  ## The tests that need a GPU
	@ctest --preset release -L gpu --no-tests=error

.PHONY: asan
asan:  ## The CPU suite under AddressSanitizer and UndefinedBehaviorSanitizer
	@scripts/setup.sh test
	@scripts/test.sh asan

.PHONY: tsan
tsan:  ## The CPU suite under ThreadSanitizer
	@scripts/setup.sh test
	@scripts/test.sh tsan

.PHONY: emulated
emulated:  ## The CUDA kernels on a GPU that is emulated on the CPU, under ASan and UBSan
	@scripts/setup.sh test
	@scripts/test.sh emulated

.PHONY: neon
neon:  ## The CPU backend for 64-bit ARM, cross-compiled and tested under qemu
	@scripts/setup.sh neon
	@scripts/neon.sh

.PHONY: tidy
tidy:  ## clang-tidy over the C++ sources
	@scripts/setup.sh tidy
	@cmake --preset tidy
	@cmake --build --preset tidy -j $(JOBS)

.PHONY: format
format:  ## clang-format every source in place
	@scripts/setup.sh format
	@scripts/format.sh -i

.PHONY: format-check
format-check:  ## Name the sources that `make format` would change; the first stage of `make test`
	@scripts/setup.sh format
	@scripts/format.sh --dry-run --Werror

.PHONY: dist-check
dist-check:  ## Build the wheel without CUDA, install it into a clean environment, take a training step there
	@scripts/setup.sh test
	@scripts/dist-check.sh

.PHONY: abi-check
abi-check:  ## Compare the library's interface with the last release's (libabigail)
	@scripts/setup.sh abi
	@scripts/abi-check.sh

.PHONY: bench
bench:  ## Forward and backward speed on this machine's CPU
	@scripts/setup.sh bench
	@cmake --preset cpu --log-level=WARNING
	@cmake --build --preset cpu -j $(JOBS) -t lla_cli
	@build/cpu/bin/lla bench forward --device cpu
	@build/cpu/bin/lla bench backward --device cpu

.PHONY: clean
clean:  ## Remove what was built; the set-up (.venv) stays
	@rm -rf build out
