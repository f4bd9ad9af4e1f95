#!/usr/bin/env bash
# Builds dist/*.whl: one wheel for every CPython >= 3.10, which carries the shared libraries that it needs, and
# dist/SHA256SUMS, which `sha256sum -c` checks.
# Usage: tools/wheel.sh (from the root, after tools/setup.sh; `make wheel` calls it).
set -euo pipefail
raw=build/wheel-raw
rm -rf "$raw" dist
mkdir -p dist
export PATH="$PWD/.venv/bin:$PATH"
python -m pip wheel --quiet --no-deps --no-build-isolation --config-settings=build-dir=build/package \
    --wheel-dir "$raw" .
# The build names the interpreter that it ran on; the extension module keeps to the limited API of 3.10.
python -m wheel tags --remove --python-tag cp310 "$raw"/*.whl
auditwheel repair --wheel-dir dist "$raw"/*.whl
(cd dist && sha256sum ./*.whl > SHA256SUMS)
ls dist
