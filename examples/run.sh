#!/usr/bin/env bash
# What `make run` shows: PyTorch with a model that is larger than its budget, then the same weights file through
# the C tool alone. DEVICE (cuda, cuda:1, sim) and BUDGET (of the tool) may be set.
#
# The tool knows tensors, not models: it streams every unit whole, and the largest of this file is the word
# embedding, 46.9 MB. A budget below that is refused; 60 MB leaves room to keep some and stream the rest. In
# PyTorch an embedding stays in host memory and only the rows looked up cross the link, so less is enough there.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
device=${DEVICE:-$($python -c 'import torch; print("cuda" if torch.cuda.is_available() else "sim")')}
weights=$($python examples/quickstart.py --weights-path)

$python examples/quickstart.py --device "$device"

options=(--budget "${BUDGET:-60MB}" --steps 3 --device "$device" --verify)
[ "$device" != sim ] || options+=(--link 0.5) # the rate that the quick start has on the simulated device
printf '\n$ stagehand stream %s %s\n' "$(basename "$weights")" "${options[*]}"
.venv/bin/stagehand stream "$weights" "${options[@]}"
