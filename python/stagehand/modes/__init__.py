"""Internal: the ways to put a model under management, and their runtimes. Public names are in `stagehand`."""
