"""Internal: weights as modules, autograd and callers see them while their bytes are elsewhere."""
