"""HostLeak: read what is the host's and not the run's (X8)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from lockgate.runtimes.container import plan
from lockgate.runtimes.single import Outcome

if TYPE_CHECKING:
    from container_fixtures import ContainerAttack

# Each id is a probe of guest/probes that asks for one primitive; its control answers on any host that runs the rung.
PROBES = (
    "read-proc-kallsyms",
    "read-proc-sys-kernel-core_pattern",
    "read-proc-sys-kernel-random-boot_id",
    "read-proc-version",
    "read-proc-cmdline",
    "read-proc-meminfo",
    "read-proc-cpuinfo",
    "read-proc-loadavg",
    "read-proc-uptime",
    "read-proc-mounts",
    "read-proc-partitions",
    "read-proc-interrupts",
    "read-proc-stat",
    "read-proc-sys-kernel-hostname",
    "read-proc-self-cgroup",
    "read-proc-self-uid_map",
    "read-proc-self-maps",
    "read-proc-self-mountinfo",
    "read-proc-self-status",
    "read-proc-self-net-dev",
    "read-proc-self-net-unix",
    "read-proc-self-limits",
    "read-proc-1-cmdline",
    "sysinfo",
    "syslog-read",
    "syslog-size",
    "sysfs-call",
    "lookup-dcookie",
    "statmount",
    "listmount",
    "lsm-list-modules",
    "mincore",
    "cachestat",
    "readahead",
    "perf-event-open",
    "quotactl",
    "quotactl-fd",
    "fs-ioc-getflags",
    "tree-beyond-declared",
    "environment",
    "uname-nodename",
)


@pytest.mark.parametrize("ident", PROBES)
def test_the_host_does_not_show(container_attack: ContainerAttack, ident: str) -> None:
    """X8: no procfs, no kernel log, no page cache, no tree beyond the declared one.

    Control: the same question reaches its primitive in an open slot, under the marker filter or with no sandbox.
    """
    assert container_attack.reached_by(ident), "the probe is dead: it proves nothing"
    row = container_attack.slot[ident]
    assert not row.reached, row.detail


def _value(outcome: Outcome) -> Any:
    assert outcome.result is not None, outcome
    assert outcome.result.error is None, outcome.result.error
    return msgspec.json.decode(outcome.result.value or b"null")


def _host_words() -> list[str]:
    """Paths that only this host has: the checkout, the interpreter's own prefix, the home of whoever runs this."""
    here = [str(Path(__file__).resolve().parents[3]), str(Path.home()), str(Path(plan.interpreter()).parents[1])]
    return [word for word in dict.fromkeys(here) if word not in {"/", "/usr", "/run"}]


def test_the_tree_is_the_declared_one(container_run: Callable[..., Outcome]) -> None:
    """X8: the root holds eight names, /proc and /tmp are empty, /etc and /dev hold what is named here."""
    places = ["/", "/dev", "/etc", "/proc", "/tmp", "/run"]
    seen = _value(container_run(f"import os\n{{d: sorted(os.listdir(d)) for d in {places}}}"))
    assert seen == {
        "/": ["dev", "etc", "lib", "lib64", "proc", "run", "tmp", "usr"],
        "/dev": ["null", "random", "urandom", "zero"],
        "/etc": ["passwd"],
        "/proc": [],
        "/tmp": [],
        "/run": [],
    }


def test_no_package_manager_and_no_packages_of_the_host(container_run: Callable[..., Outcome]) -> None:
    """X11: neither pip nor what this interpreter has installed is there. Control: the standard library is."""
    source = (
        "import importlib.util as u, os\n"
        "names = ['pip', 'setuptools', 'msgspec', 'pytest', 'lockgate', 'json']\n"
        "lib = os.path.dirname(os.__file__)\n"
        "extra = [d for d in ('site-packages', 'dist-packages', 'ensurepip') if os.path.isdir(f'{lib}/{d}')]\n"
        "[[u.find_spec(n) is not None for n in names], [os.listdir(f'{lib}/{d}') for d in extra]]"
    )
    found, hidden = _value(container_run(source))
    assert found == [False, False, False, False, False, True]
    assert all(names == [] for names in hidden)


def test_tracebacks_name_no_path_of_this_host(container_run: Callable[..., Outcome]) -> None:
    """X8: from the code's own first frame on, and the standard library under its neutral path."""
    outcome = container_run("import json\ndef f():\n    json.loads('[')\nf()")
    assert outcome.result is not None
    assert outcome.result.error is not None
    text = outcome.result.error.traceback
    frames = [line.split('"')[1] for line in text.splitlines() if line.startswith("  File")]
    assert frames[:2] == ["<run>", "<run>"]
    assert all(one.startswith("/usr/lib/python3") for one in frames[2:])
    assert not [word for word in _host_words() if word in text]


def test_memory_holds_no_path_of_this_host(container_run: Callable[..., Outcome]) -> None:
    """X8: no string in the slot's interpreter names the checkout, the home or the interpreter's place.

    Control: the same search finds a word that was planted.
    """
    words = _host_words()
    assert words, "this host gives nothing to look for"
    halves = [[word[:3], word[3:]] for word in words]  # so that the search does not find itself
    source = (
        "import gc, sys\n"
        f"words = [a + b for a, b in {halves!r}]\n"
        "plant = {'planted': 'x' + words[0] + 'x'}\n"
        "def strings():\n"
        "    seen = set()\n"
        "    todo = [gc.get_objects(), *(vars(m) for m in list(sys.modules.values()))]\n"
        "    todo += [sys.path, sys.argv, sys.orig_argv, list(vars(sys).values())]\n"
        "    for group in todo:\n"
        "        for one in (group.values() if isinstance(group, dict) else group):\n"
        "            for part in ((one,) if isinstance(one, str) else gc.get_referents(one)):\n"
        "                if isinstance(part, str) and id(part) not in seen:\n"
        "                    seen.add(id(part))\n"
        "                    yield part\n"
        "hits = [s[:200] for s in strings() if any(w in s for w in words) and s not in words]\n"
        "[len(hits), [s for s in hits if s != plant['planted']]]"
    )
    count, strangers = _value(container_run(source))
    assert count >= 1
    assert strangers == []


def test_callers_frames_are_the_guests_own(container_run: Callable[..., Outcome]) -> None:
    """X8: walking up from the code ends at one line, with nothing of the template in its names."""
    source = (
        "import sys\nf, seen = sys._getframe(), []\n"
        "while f:\n    seen.append(f.f_code.co_filename)\n    last, f = f, f.f_back\n"
        "[sorted(set(seen)), sorted(k for k in last.f_globals if not k.startswith('__')),\n"
        " [m for m in sys.modules if 'lockgate' in m]]"
    )
    files, names, modules = _value(container_run(source))
    assert files == ["<run>", "<runner>", "<string>"]
    assert names == ["ready", "serve", "sys"]
    assert modules == []


def test_memory_size_of_the_host_is_not_answered(container_run: Callable[..., Outcome]) -> None:
    """X8: sysconf would answer noise for a refused call; it says so instead. Control: other names answer."""
    source = (
        "import os\nseen = [os.sysconf('SC_PAGESIZE')]\n"
        "for name in ('SC_PHYS_PAGES', os.sysconf_names['SC_AVPHYS_PAGES']):\n"
        "    try:\n        os.sysconf(name)\n    except ValueError:\n        seen.append('refused')\nseen"
    )
    assert _value(container_run(source)) == [os.sysconf("SC_PAGESIZE"), "refused", "refused"]
