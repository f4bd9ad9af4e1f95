"""Internal: steps of a stack of blocks by several ways, as a process that `stagehand bench` starts. The tool decides on
sizes and times (cli/bench.c); docs/bench.md says what comes out."""
