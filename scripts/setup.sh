#!/bin/sh
# Make .venv ready for `run` (the product and its example) or `dev` (that, and everything the checks need).
#
# Rule 1: asks nothing and assumes nothing but Python 3.11 or newer, git and make.
# Rule 2: does no work when nothing changed: a stamp holds the checksum of what was installed.
# Rule 3: says the next step when it cannot go on.
set -eu
mode="${1:-run}"
cd "$(dirname "$0")/.."

fail() { printf 'error: %s\nnext step: %s\n' "$1" "$2" >&2; exit 3; }

find_python() {
    for candidate in ${PYTHON:-} python3 python3.11 python3.12 python3.13 python3.14; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer was found" "install python3 (Debian 12: apt-get install python3), or set PYTHON"
}

# Root installs a missing Debian package; a plain user does with passwordless sudo, else is told what to ask for.
apt_install() {
    if [ "$(id -u)" = 0 ]; then as_root=""; elif sudo -n true 2>/dev/null; then as_root="sudo -n"; else
        fail "$* is missing and you are not root" "ask for: apt-get install $*"
    fi
    command -v apt-get >/dev/null || fail "$* is missing" "install it with this system's package manager"
    $as_root apt-get update -qq && $as_root apt-get install -y -qq "$@" >/dev/null
}

python=$(find_python)
"$python" -c 'import venv, ensurepip' 2>/dev/null || apt_install python3-venv

# A virtual environment that was copied or whose interpreter went away is made anew.
if ! .venv/bin/python -c "import sys; sys.exit(sys.prefix != '$PWD/.venv')" 2>/dev/null; then
    echo "setting up .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi

stamp=".venv/.stamp-$mode"
want=$(cksum pyproject.toml scripts/setup.sh | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
    echo "installing what '$mode' needs (a minute the first time)"
    if [ "$mode" = dev ]; then
        # --group needs pip 25.1; Debian 12 has 23.0.
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable . --group dev
    else
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[atlas]"
    fi
    echo "$want" > "$stamp"
fi

# Clients that the egress tests run in a namespace without a route. Tests whose client is missing say so and skip.
if [ "$mode" = dev ]; then
    missing=""
    for pair in curl:curl git:git dig:bind9-dnsutils ping:iputils-ping npm:npm node:nodejs; do
        command -v "${pair%%:*}" >/dev/null || missing="$missing ${pair#*:}"
    done
    # shellcheck disable=SC2086 - package names, one word each
    [ -z "$missing" ] || (apt_install $missing) || echo "note: going on without$missing: tests of them will skip" >&2
fi

# The attack suite compares the sandbox with bubblewrap where there is one; everything else goes without.
if [ "$mode" = dev ] && ! command -v bwrap >/dev/null; then
    (apt_install bubblewrap) || echo "note: going on without bubblewrap: the attack suite will lack that control" >&2
fi

# The guest of the wasm rung: compiled once for this machine, user and engine, kept outside of this checkout. What is
# there is not made again; its memory images follow the guest's files and take seconds.
if [ "$mode" = dev ]; then
    nice .venv/bin/python -m lockgate wasm build >/dev/null ||
        echo "note: going on without the guest of the wasm rung: its tests will fail as root, else skip" >&2
fi

# The gVisor rung: Debian's runsc, the tested build of it, kept outside of this checkout, and twenty boots that say
# whether it may be used here. Both are skipped when they were done before.
if [ "$mode" = dev ] && [ "$(id -u)" = 0 ]; then
    command -v mkfs.erofs >/dev/null || (apt_install erofs-utils) || true
    .venv/bin/python -m lockgate gvisor check >/dev/null 2>&1 ||
        { .venv/bin/python -m lockgate gvisor fetch >/dev/null && .venv/bin/python -m lockgate gvisor check >/dev/null; } ||
        echo "note: going on without runsc: tests of the gvisor rung will fail" >&2
fi

# promtool checks the shipped alerting rules. Of Debian's package only that program is taken, so that no service starts.
if [ "$mode" = dev ] && [ "$(id -u)" = 0 ] && ! command -v promtool >/dev/null && [ ! -x .venv/bin/promtool ]; then
    (
        cd .venv || exit
        apt-get download -qq prometheus 2>/dev/null || { apt-get update -qq && apt-get download -qq prometheus; }
        dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x --strip-components=3 -C bin ./usr/bin/promtool
        rm -f prometheus_*.deb
        [ -x bin/promtool ]
    ) || echo "note: going on without promtool: the check of the alerting rules will skip" >&2
fi

# The microvm rung, emulated, for tests: QEMU, Debian's cloud kernel (unpacked, never installed) and a snapshot of our
# guest in .venv/microvm. Made again when the guest or its builder changed. On real hardware: make test-kvm.
microvm_tools() {
    missing=""
    for pair in qemu-system-x86_64:qemu-system-x86 mkfs.erofs:erofs-utils gcc:gcc dpkg-deb:dpkg; do
        command -v "${pair%%:*}" >/dev/null || missing="$missing ${pair#*:}"
    done
    # shellcheck disable=SC2086 - package names, one word each
    [ -z "$missing" ] || apt_install $missing
}
microvm_kernel() {
    mkdir -p .venv/microvm-kernel
    ls .venv/microvm-kernel/*.deb >/dev/null 2>&1 && return
    meta=linux-image-cloud-amd64
    apt-cache depends "$meta" 2>/dev/null | grep -q Depends: || { [ "$(id -u)" = 0 ] && apt-get update -qq; }
    name=$(apt-cache depends "$meta" | awk '/Depends: linux-image-/ {print $2; exit}')
    (cd .venv/microvm-kernel && apt-get download -qq "$name" >/dev/null 2>&1)
}
if [ "$mode" = dev ] && [ "$(uname -m)" = x86_64 ]; then
    made=.venv/microvm/choice.json
    if [ ! -e "$made" ] || [ -n "$(find guest/microvm guest/*.py src/lockgate/runtimes/microvm src/lockgate/kernel -name '*.[cp]*' -newer "$made" ! -name '*.pyc' | head -1)" ]; then
        echo "building the emulated machine of the microvm rung (half a minute)"
        { (microvm_tools) && microvm_kernel && .venv/bin/python -m lockgate microvm build --accel tcg \
            --store .venv/microvm --kernel .venv/microvm-kernel/*.deb >/dev/null 2>&1; } ||
            echo "note: going on without it: tests of the microvm rung will fail as root, else skip" >&2
    fi
fi
