#!/usr/bin/env bash
# Runs the Python tests with another PyTorch than that of .venv, in a virtual environment of its own, build/torch/NAME,
# which stays for the next run. Usage: TORCH=torch==2.4.1 tools/test_torch.sh [ARGUMENT ...] (from the root, after
# `make build wheel`; `make test-torch` calls it). ARGUMENTS go to pytest, in place of the whole suite.
#
#   TORCH   what pip installs. PyPI's builds bring CUDA's libraries: several GB for each version
#   PYTHON  the interpreter to use (python3); it has to be one that this PyTorch has a build for
#
# Ends with 3 where pip cannot install that PyTorch.
set -euo pipefail
torch=${TORCH:?the PyTorch to test with, as pip names it: TORCH=torch==2.4.1}
venv=build/torch/${torch//[^A-Za-z0-9._-]/_}

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    "$venv/bin/python" -m pip install --quiet "$torch" || exit 3
fi
"$venv/bin/python" -m pip install --quiet expecttest hypothesis meson ninja numpy pytest pytest-xdist safetensors setuptools
"$venv/bin/python" -m pip install --quiet --no-deps --force-reinstall dist/*.whl
"$venv/bin/python" -c 'import torch; print("PyTorch", torch.__version__)'
if [ $# -gt 0 ]; then
    exec "$venv/bin/python" -m pytest "$@"
fi
exec "$venv/bin/python" tests/run.py python
