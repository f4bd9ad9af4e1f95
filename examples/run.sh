#!/usr/bin/env bash
# What `make run` shows: PyTorch with a model that is larger than its budget, then the tool on the same
# weights file. BUDGET sets the tool's budget.
set -euo pipefail
cd "$(dirname "$0")/.."
weights=$(.venv/bin/python examples/quickstart.py --weights-path)
.venv/bin/python examples/quickstart.py
echo
echo "\$ stagehand stream $(basename "$weights") --budget ${BUDGET:=60MB} --steps 3 --verify"
.venv/bin/stagehand stream "$weights" --budget "$BUDGET" --steps 3 --verify
