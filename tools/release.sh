#!/usr/bin/env bash
# What is published, in dist/: the source distribution of HEAD, a wheel that is built from it, and SHA256SUMS, which
# `sha256sum -c` checks. The wheel runs with every CPython >= 3.10 on Linux with glibc $GLIBC or newer: it is compiled
# by zig's clang (ziglang, from PyPI), which links to the symbols of an older glibc; `make wheel` links to those of the
# machine that builds. Usage: tools/release.sh (from the root, after tools/setup.sh ziglang; `make release` calls it).
#
#   GLIBC  the oldest one (2.28)
set -euo pipefail
glibc=${GLIBC:-2.28}
export PATH="$PWD/.venv/bin:$PATH"
root=$PWD work=$PWD/build/release

if [ -n "$(git status --porcelain --untracked-files=no)" ]; then
    echo "release: the tree has changes that are not committed; the source distribution is that of HEAD" >&2
    exit 1
fi
rm -rf "$work" dist
mkdir -p "$work/include" "$work/lib" dist

python -c 'import mesonpy; print(mesonpy.build_sdist("dist"))'

# A compiler for another glibc does not look into /usr: it gets what is needed from there alone.
header() { printf '#include <%s>\n' "$1" | cc -E - | sed -n "s|^# 1 \"\(.*/$1\)\".*|\1|p" | head -1; }
for name in jansson.h jansson_config.h zlib.h zconf.h xxhash.h xxh3.h; do
    path=$(header "$name")
    [ -z "$path" ] || ln -s "$path" "$work/include/"
done
for name in libjansson.so libz.so; do ln -s "$(cc -print-file-name="$name")" "$work/lib/"; done
printf '#!/bin/sh\nexec "%s/.venv/bin/python" -m ziglang cc -target %s-linux-gnu.%s "$@"\n' \
    "$root" "$(uname -m)" "$glibc" > "$work/cc"
chmod +x "$work/cc"

CC=$work/cc CFLAGS="-I$work/include -fno-sanitize=undefined" LDFLAGS="-L$work/lib -s" \
    python -m pip wheel --quiet --no-deps --no-build-isolation --config-settings=build-dir="$work/build" \
    --wheel-dir "$work/raw" dist/*.tar.gz
python -m wheel tags --remove --python-tag cp310 "$work"/raw/*.whl
auditwheel repair --plat "manylinux_${glibc/./_}_$(uname -m)" --wheel-dir dist "$work"/raw/*.whl

# What was built is what runs, in an environment of its own: the tool, and a device. PyTorch is that of .venv.
python -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --no-deps --no-index dist/*.whl
python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    > "$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/behind.pth"
"$work/venv/bin/python" -c 'import stagehand; assert "release/venv" in stagehand.__file__; stagehand.Device("sim")'
"$work/venv/bin/stagehand" --version
(cd dist && sha256sum ./*.tar.gz ./*.whl > SHA256SUMS && sha256sum --quiet -c SHA256SUMS)
ls dist
