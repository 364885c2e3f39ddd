#!/bin/sh
# Build the smallest guest: `build.sh OUTPUT`. Needs gcc and binutils; takes no option from the environment.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?"usage: build.sh OUTPUT"}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags="-O2 -Wall -Wextra -Werror -ffreestanding -mgeneral-regs-only -fno-pic -fno-pie -mcmodel=small -mno-red-zone
 -fno-stack-protector -fcf-protection=none -fno-tree-vectorize -fno-tree-loop-distribute-patterns
 -fno-asynchronous-unwind-tables"
# shellcheck disable=SC2086
gcc $flags -c "$here/vsk.c" -o "$work/vsk.o"
gcc -c "$here/start.S" -o "$work/start.o"
ld -static -nostdlib --build-id=none -z noexecstack -Ttext=0x1000000 -e _start "$work/start.o" "$work/vsk.o" -o "$out"
