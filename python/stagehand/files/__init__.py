"""Internal: where weights come from: checkpoints, quantised files, pinned slabs."""
