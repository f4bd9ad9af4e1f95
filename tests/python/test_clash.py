"""A distribution that is called stagehand, and is not ours, is noticed at import."""

import subprocess
import sys

from stagehand._clash import warn_of_clash


def stderr_of_import(extra_path) -> str:
    code = f"import sys; sys.path.append({str(extra_path)!r}); import stagehand"
    command = [sys.executable, "-W", "always", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_another_distribution_of_this_name_is_explained(tmp_path):
    info = tmp_path / "stagehand-9.8.7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stagehand\nVersion: 9.8.7\n")
    said = stderr_of_import(tmp_path)
    assert "9.8.7" in said and "stagehand-offload" in said and "pip uninstall stagehand" in said


def test_alone_there_is_nothing_to_say(tmp_path, recwarn):
    assert "stagehand-offload" not in stderr_of_import(tmp_path)
    warn_of_clash()
    assert not [warning for warning in recwarn.list if "stagehand" in str(warning.message)]
