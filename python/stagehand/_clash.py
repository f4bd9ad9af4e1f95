"""Two distributions put files into the folder `stagehand`: this one, stagehand-offload, and an unrelated one
on PyPI that is called stagehand. Whichever is installed last wins; this says so before it confuses."""

from __future__ import annotations

import importlib.metadata
import warnings

OTHER = "stagehand"


def warn_of_clash() -> None:
    """Warns where the other distribution is installed in the same environment."""
    try:
        other = importlib.metadata.distribution(OTHER)
    except importlib.metadata.PackageNotFoundError:
        return
    warnings.warn(
        f"another package called {OTHER!r} ({other.version}) is installed beside this one, which is "
        "distributed as 'stagehand-offload'. Both put their modules into the folder 'stagehand', where the one "
        "that was installed last overwrote the other. Keep one of them in an environment: `pip uninstall "
        "stagehand`, then `pip install --force-reinstall stagehand-offload`, since the first removes shared "
        "files too",
        RuntimeWarning, stacklevel=3)
