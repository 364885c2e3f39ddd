#!/bin/sh
# What tests/browser needs: chromium, cmark-gfm and LibreOffice from Debian, renderers from npm. Names of packages only.
#
# Rule 1: does nothing that is done already.
# Rule 2: says the next step when it cannot go on.
set -eu
cd "$(dirname "$0")/.."
fail() { printf 'error: %s\nnext step: %s\n' "$1" "$2" >&2; exit 3; }
missing=""
command -v chromium >/dev/null || missing="$missing chromium"
command -v cmark-gfm >/dev/null || missing="$missing cmark-gfm"
command -v soffice >/dev/null || missing="$missing libreoffice-calc-nogui"
command -v openssl >/dev/null || missing="$missing openssl"
command -v npm >/dev/null || missing="$missing npm"
if [ -n "$missing" ]; then
    if [ "$(id -u)" = 0 ]; then as_root=""; elif sudo -n true 2>/dev/null; then as_root="sudo -n"; else
        fail "not installed:$missing" "ask for: apt-get install$missing"
    fi
    # shellcheck disable=SC2086
    $as_root apt-get update -qq && $as_root apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi
.venv/bin/python -m pip install --quiet --disable-pip-version-check "playwright>=1.49"
cd tests/browser
stamp=node_modules/.stamp
want=$(cksum package.json page/main.js | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
    npm install --silent --no-audit --no-fund --no-package-lock
    node_modules/.bin/esbuild page/main.js --bundle --minify --format=iife --outfile=node_modules/.page.js --log-level=error
    echo "$want" > "$stamp"
fi
