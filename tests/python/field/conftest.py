"""The cases of docs/field-cases.md use the helpers of the tests above."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
