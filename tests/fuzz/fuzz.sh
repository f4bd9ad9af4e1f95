#!/bin/sh
# Looks for inputs that break a fuzz target, with clang's libFuzzer under the address and undefined-behaviour sanitizers.
#
#   fuzz.sh TARGET [SECONDS]      searches, 120 s without a number; a run ends with its number of executions
#   fuzz.sh --merge TARGET        takes what covered new code into corpus/TARGET, to be looked through before it is committed
#   fuzz.sh --list                the targets
#
# The library is built in build-fuzz/lib. What fails is left in build-fuzz/ and named; what covers new code, in build-fuzz/TARGET.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
out=$root/build-fuzz
list() { sed -n "s/^  '\([a-z]*\)': \[.*/\1/p" "$here/meson.build"; }

merge=
case ${1:-} in
--list) list && exit ;;
--merge) merge=1 && shift ;;
esac
target=${1:?usage: fuzz.sh [--merge] TARGET [SECONDS]}
seconds=${2:-120}
list | grep -qx "$target" || { echo "no such target: $target; there are: $(list | tr '\n' ' ')" >&2 && exit 2; }
more=$(sed -n "s/^  '$target': \[\(.*\)\],/\1/p" "$here/meson.build" | tr -d "',")

[ -f "$out/lib/build.ninja" ] || CC=clang meson setup "$out/lib" "$root" -Db_sanitize=address,undefined -Db_lundef=false \
    -Doptimization=1 -Ddebug=true -Dwerror=false >/dev/null \
    "-Dc_args=-fsanitize=fuzzer-no-link -fno-sanitize-recover=undefined"
ninja -C "$out/lib" libstagehand.a >/dev/null
mkdir -p "$out/$target"
# shellcheck disable=SC2046,SC2086 # one word per flag
(cd "$here" && clang -std=c17 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined \
    -I"$root/include" -I"$root/src" -I"$root/tests" "fuzz_$target.c" $(ls "${target}"_*.c 2>/dev/null) files.c $more "$out/lib/libstagehand.a" \
    $(pkg-config --cflags --libs jansson zlib) -lm -ldl -lpthread -o "$out/fuzz_$target")
if [ -n "$merge" ]; then
    exec "$out/fuzz_$target" -merge=1 -max_len=600 "$here/corpus/$target" "$out/$target"
fi
exec "$out/fuzz_$target" -max_total_time="$seconds" -max_len=4096 -timeout=20 -rss_limit_mb=4096 -print_final_stats=1 \
    -artifact_prefix="$out/" "$out/$target" "$here/corpus/$target"
