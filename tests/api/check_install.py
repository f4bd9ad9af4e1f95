#!/usr/bin/env python3
"""What `meson install` puts down is enough: mini projects (tests/install) for pkg-config, CMake and Meson build against
it in C17 and in C++17 and run, with the shared library and with the archive; it is found by the versions that
docs/versioning.md says; exactly the public headers and the manual are installed.

    check_install.py BUILD_DIR COMPILER...
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from support import tap

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROJECTS = ROOT / "tests" / "install"
build, compiler = pathlib.Path(sys.argv[1]), sys.argv[2:]


def run(command: list, **environment: str) -> str:
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} gave {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


def need(program: str) -> str:
    found = shutil.which(program)
    # A wrapper that picks among installed versions may be there without one.
    if not found or subprocess.run([found, "--version"], capture_output=True).returncode:
        raise tap.Skip(f"{program} is not installed")
    return found


def cpp_compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return name
    raise tap.Skip("no C++ compiler is installed")


class Installed:
    """The library, installed below a folder, as a distribution's package would be."""

    def __init__(self, root: pathlib.Path):
        self.root, self.work = root / "installed", root
        run(["meson", "install", "-C", build, "--no-rebuild", "--quiet", "--destdir", self.root])
        self.pkgconfig = next(self.root.rglob("stagehand.pc")).parent
        self.library = self.pkgconfig.parent
        self.prefix = next(self.root.rglob("include/stagehand")).parent.parent
        self.version = run([ROOT / "tools/version.py"]).strip()
        major, minor, _ = self.version.split(".")
        self.interface = f"0.{minor}" if major == "0" else major  # what the shared library's name ends with
        self.environment = {"PKG_CONFIG_PATH": str(self.pkgconfig), "PKG_CONFIG_SYSROOT_DIR": str(self.root)}

    def project(self, name: str, work: str) -> pathlib.Path:
        """A copy of a mini project, complete."""
        folder = self.work / work
        shutil.copytree(PROJECTS / name, folder)
        for source in ("consumer.c", "consumer.cpp"):
            shutil.copy(PROJECTS / source, folder)
        return folder

    def runs(self, program: pathlib.Path, shared: bool = True) -> None:
        needed = run(["ldd", program], LD_LIBRARY_PATH=str(self.library))
        name = f"libstagehand.so.{self.interface} "
        assert (name in needed) == shared and ("libstagehand" in needed) == shared, needed
        assert run([program], LD_LIBRARY_PATH=str(self.library)).strip() == self.version


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        it = Installed(pathlib.Path(folder))

        def make(language: str, static: bool) -> None:
            need("pkg-config")
            chosen = ["CC=" + " ".join(compiler)] if language == "c" else ["CXX=" + cpp_compiler()]
            project = it.project("pkgconfig", f"make-{language}-{static}")
            program = f"consumer-{language}"
            run(["make", "-C", project, *chosen, f"PROGRAMS={program}", *(["STATIC=1"] if static else [])],
                **it.environment)
            it.runs(project / program, not static)

        def cmake() -> None:
            project = it.project("cmake", "cmake")
            configure = [need("cmake"), "-S", project, "-B", project / "build", "-G", "Ninja", f"-DWANTED={it.version}",
                         f"-DCMAKE_PREFIX_PATH={it.prefix}"]
            run(configure, CC=" ".join(compiler))
            run(["cmake", "--build", project / "build"])
            built = sorted(path.name for path in (project / "build").glob("consumer-*"))
            assert {"consumer-c", "consumer-static"} <= set(built), built
            for name in built:
                it.runs(project / "build" / name, name != "consumer-static")

        def cmake_cpp() -> None:
            need("cmake"), cpp_compiler()
            assert (it.work / "cmake/build/consumer-cpp").exists()

        def cmake_versions() -> None:
            major, minor, patch = map(int, it.version.split("."))
            fits = [f"{major}", f"{major}.{minor}", it.version, f"{major}.{minor}...{major}.{minor + 1}"]
            no = [f"{major + 1}", f"{major}.{minor + 1}", f"{major}.{minor}.{patch + 1}",
                  f"{major}...<{it.version}", f"{major + 1}...{major + 2}"]
            no += [f"{major}.{minor - 1}"] if major == 0 and minor else []
            said = run([need("cmake"), "-S", PROJECTS / "cmake-versions", "-B", it.work / "versions", "-G", "Ninja",
                        "-DWANTED=" + ";".join(fits + no), f"-DWHERE={it.library / 'cmake'}"])
            found = dict(re.findall(r"^-- wanted (\S+): (\d)", said, flags=re.MULTILINE))
            assert found == {**dict.fromkeys(fits, "1"), **dict.fromkeys(no, "0")}, found
            parts = dict(re.findall(r"^-- component (\S+): (\w+)", said, flags=re.MULTILINE))
            assert parts == {"stagehand": "1", "static": "1", "no-such-part": "0"}, parts

        def meson() -> None:
            need("pkg-config")
            project = it.project("meson", "meson")
            run(["meson", "setup", project / "build", project], CC=" ".join(compiler), **it.environment)
            run(["meson", "compile", "-C", project / "build"])
            for program in [path for path in (project / "build").glob("consumer-*") if path.is_file()]:
                it.runs(program)
            assert (project / "build/consumer-c").exists()

        def only_public_headers() -> None:
            ours = sorted(path.name for path in (ROOT / "include/stagehand").iterdir())
            installed = sorted(path.name for path in it.root.rglob("include/**/*") if path.is_file())
            assert installed == ours

        def the_manual() -> None:
            ours = sorted(path.name for path in (ROOT / "docs/man").glob("*.1"))
            installed = sorted(path.name.removesuffix(".gz") for path in it.root.rglob("man/man1/*"))
            assert ours and installed == ours

        def names() -> None:
            said = run(["readelf", "-d", it.library / "libstagehand.so"])
            assert f"soname: [libstagehand.so.{it.interface}]" in said, said
            assert (it.library / "libstagehand.so").resolve().name == f"libstagehand.so.{it.version}"
            assert f"Version: {it.version}\n" in (it.pkgconfig / "stagehand.pc").read_text()

        return tap.run([
            ("pkg-config: a C program builds with the shared library and runs", lambda: make("c", False)),
            ("pkg-config: a C program builds with the archive and runs", lambda: make("c", True)),
            ("pkg-config: a C++ program builds with the shared library and runs", lambda: make("cpp", False)),
            ("pkg-config: a C++ program builds with the archive and runs", lambda: make("cpp", True)),
            ("CMake: programs build with the shared library and the archive and run", cmake),
            ("CMake: a C++ program is among them", cmake_cpp),
            ("CMake: find_package takes the versions that fit, and no others", cmake_versions),
            ("Meson: programs build and run", meson),
            ("exactly the public headers are installed", only_public_headers),
            ("the manual is installed", the_manual),
            ("the shared library's name says which interface it has", names),
        ])


sys.exit(main())
