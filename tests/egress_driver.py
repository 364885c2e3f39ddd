"""Runs inside a confined namespace: one JSON object of commands on stdin, one of results on stdout. Stdlib only.

First it says "ready"; then each command `{"argv": [...], "unset": bool, "stdin": "..."}` is run with a deadline.
`unset` takes the proxy variables away; the result is `[exit code or null, stdout, stderr, seconds]`.
"""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

PROXIES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "NODE_USE_ENV_PROXY")
SECONDS = 60
MOST = 4000
AT_ONCE = 4


def run(one):
    began = time.monotonic()
    ambient = dict(os.environ)  # noqa: TID251 - a confined command's own
    env = {key: value for key, value in ambient.items() if not (one.get("unset") and key in PROXIES)}
    env.update(one.get("env", {}))
    try:
        done = subprocess.run(
            one["argv"],
            env=env,
            input=one.get("stdin", ""),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
        result = [done.returncode, done.stdout[:MOST], done.stderr[-MOST:]]
    except subprocess.TimeoutExpired:
        result = [None, "", "timeout"]
    except OSError as error:
        result = [None, "", str(error)]
    return [*result, time.monotonic() - began]


sys.stdout.write("ready\n")
sys.stdout.flush()
commands = json.loads(sys.stdin.readline())
with ThreadPoolExecutor(AT_ONCE) as pool:
    results = dict(zip(commands, pool.map(run, commands.values()), strict=True))
sys.stdout.write(json.dumps(results) + "\n")
