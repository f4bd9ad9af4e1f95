"""A part of stagehand.compat.spill under the name that programs import it by: host memory in classes."""

from ..compat.spill import CPUSpillBackend

__all__ = ["CPUSpillBackend"]
