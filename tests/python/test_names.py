"""What `import stagehand` gives: every public name, whatever was imported before."""

import subprocess
import sys

import children
import pytest
import stagehand


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("before", ["stagehand.load", "from stagehand.layer import LayerRuntime"])
def test_functions_are_not_hidden_by_the_modules_that_define_them(before):
    done = children.run_bare(
        f"import stagehand\n{before}\nassert callable(stagehand.layer), stagehand.layer\n"
        "assert callable(stagehand.load), stagehand.load\nassert stagehand.wrap is stagehand.layer")
    assert done.status == 0, done.stderr


def test_every_public_name_is_there():
    missing = [name for name in stagehand.__all__ if getattr(stagehand, name, None) is None]
    assert not missing
    assert set(stagehand.__all__) <= set(dir(stagehand))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        stagehand.no_such_name


def test_the_package_itself_does_not_need_pytorch():
    done = python("import sys\nsys.modules['torch'] = None\nimport stagehand\nstagehand.parse_size('8GB')\n"
                  "try:\n    stagehand.layer\nexcept ImportError as error:\n    print(error)")
    assert done.returncode == 0, done.stderr
    assert "PyTorch" in done.stdout
