"""Internal: the ways to put a managed model, and their runtimes. Public names are in `stagehand`."""
