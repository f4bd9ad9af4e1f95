"""A part of stagehand.compat.spill under the name that programs import it by: the pair for saved_tensors_hooks."""

from ..compat.spill import ActivationHookContext

__all__ = ["ActivationHookContext"]
