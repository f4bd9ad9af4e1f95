#!/usr/bin/env python3
"""What `meson install` puts down is enough: a program finds it with pkg-config, builds and runs, with the
shared library and with the static one; of the headers exactly the public ones are installed.

    check_install.py BUILD_DIR COMPILER...
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from support import tap

build, compiler = pathlib.Path(sys.argv[1]), sys.argv[2:]
PROGRAM = """
#include <stagehand/stagehand.h>
#include <stdio.h>
#include <string.h>
int main(void) {
    sth_device *device = NULL;
    if (sth_device_open("no-such-device", NULL, &device) != STH_BACKEND_UNAVAILABLE) return 1;
    if (!strstr(sth_last_error()->message, "no-such-device")) return 2;
    return puts(sth_version()) < 0;
}
"""


def run(command: list, **environment: str) -> str:
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} gave {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        run(["meson", "install", "-C", build, "--no-rebuild", "--quiet", "--destdir", root])
        config = next(root.rglob("stagehand.pc"))
        library = config.parent.parent
        source = root / "program.c"
        source.write_text(PROGRAM)

        def ask(*what: str) -> list[str]:
            if not shutil.which("pkg-config"):
                raise tap.Skip("pkg-config is not installed")
            return run(["pkg-config", *what, "stagehand"], PKG_CONFIG_PATH=str(config.parent),
                       PKG_CONFIG_SYSROOT_DIR=str(root)).split()

        def check(name: str, flags: list[str]) -> None:
            version = ask("--modversion")[0]
            program = root / name
            run([*compiler, "-std=c17", source, *flags, "-o", program])
            assert run([program], LD_LIBRARY_PATH=str(library)).strip() == version

        def shared() -> None:
            check("shared", ask("--cflags", "--libs"))
            assert "libstagehand.so.0" in run(["ldd", root / "shared"], LD_LIBRARY_PATH=str(library))

        def static() -> None:
            needed = [flag for flag in ask("--libs", "--static") if flag.startswith("-l")]
            private = [flag for flag in needed if flag != "-lstagehand"]
            check("static", [*ask("--cflags"), library / "libstagehand.a", *private])
            assert "libstagehand" not in run(["ldd", root / "static"])

        def only_public_headers() -> None:
            ours = pathlib.Path(__file__).resolve().parents[2] / "include" / "stagehand"
            installed = sorted(path.name for path in root.rglob("include/**/*") if path.is_file())
            assert installed == sorted(path.name for path in ours.iterdir())

        return tap.run([
            ("a program builds with the shared library", shared),
            ("a program builds with the static library", static),
            ("exactly the public headers are installed", only_public_headers),
        ])


sys.exit(main())
