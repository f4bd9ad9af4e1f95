#!/usr/bin/env python3
"""Prints the project's version, which stands in include/stagehand/stagehand.h and nowhere else."""

import pathlib
import re

header = pathlib.Path(__file__).resolve().parent.parent / "include/stagehand/stagehand.h"
parts = dict(re.findall(r"#define STH_VERSION_(MAJOR|MINOR|PATCH) (\d+)", header.read_text()))
print(".".join(parts[name] for name in ("MAJOR", "MINOR", "PATCH")))
