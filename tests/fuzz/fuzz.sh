#!/bin/sh
# fuzz.sh TARGET [SECONDS]: runs one fuzz target with clang's libFuzzer under the address and
# undefined-behaviour sanitizers. What fails is left in build-fuzz/; what covers new code is merged into
# corpus/TARGET, to be looked through before it is committed.
set -eu
target=${1:?usage: fuzz.sh TARGET [SECONDS]}
seconds=${2:-120}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
out=$root/build-fuzz
mkdir -p "$out/$target"
cd "$root"
# shellcheck disable=SC2046 # one word per source file
clang -std=c17 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -Iinclude -Isrc -Itests \
    "$here/fuzz_$target.c" "$here/files.c" src/base/*.c $(ls src/store/*.c | grep -v pool) src/quant/*.c \
    src/api/checkpoint.c src/api/quant.c src/api/status.c src/api/transfer.c $(pkg-config --cflags --libs jansson zlib) -lm -lpthread -o "$out/fuzz_$target"
"$out/fuzz_$target" -max_total_time="$seconds" -max_len=4096 -artifact_prefix="$out/" \
    "$out/$target" "$here/corpus/$target"
"$out/fuzz_$target" -merge=1 -max_len=600 "$here/corpus/$target" "$out/$target"
