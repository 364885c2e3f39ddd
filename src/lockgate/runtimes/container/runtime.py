"""The container rung: namespaces, Landlock, seccomp and limits on the host's own kernel.

Rule 1: a packaging boundary, not a wall against hostile code: the kernel is shared (X3).
Rule 2: whatever is missing on this host is named, with its fix; nothing is left out in silence.
"""

from __future__ import annotations

import contextlib
import errno
import resource
from pathlib import Path
from typing import Final

import msgspec

from lockgate.contract.errors import CannotIsolate, HostFault
from lockgate.contract.run import Rung
from lockgate.contract.rungs import Boundary
from lockgate.runtimes import forked, ids
from lockgate.runtimes.container import layout, plan
from lockgate.runtimes.forked import ForkedTemplate
from lockgate.runtimes.protocol import MachineFailed, Nature, TemplateSpec, Unavailable
from lockgate.runtimes.single import boots

START_SECONDS: Final = 60.0  # preloading pandas on a cold disk takes seconds
PROBE_SECONDS: Final = 10.0

_USERNS_FIX: Final = (
    "allow user namespaces: kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0 and, on Ubuntu, "
    "kernel.apparmor_restrict_unprivileged_userns=0 (sysctl); in a container, a seccomp profile that permits unshare"
)


class ContainerRuntime:
    """`runtimes.protocol.Runtime` for the container rung.

    Args:
        template_arguments: arguments of the template program. Tests give some (see template.py); nothing else does.

    """

    rung: Rung = "container"
    boundary: Boundary = "shared kernel"
    nature: Nature = Nature(work=layout.RUN_DIR)

    def __init__(self, template_arguments: tuple[str, ...] = ()) -> None:
        self._arguments = template_arguments

    def start(self, spec: TemplateSpec) -> ForkedTemplate:
        """Start a template and wait until it is ready, with a deadline.

        Raises:
            CannotIsolate: the host lacks a piece; names it and the fix.
            HostFault: a step failed that should not fail here.

        """
        raise_descriptor_limit()
        try:
            tree = plan.build(spec.tree)
        except plan.PlanError as error:
            raise CannotIsolate(
                f"the container rung cannot be had: {error.unavailable.missing}", next_step=error.unavailable.fix
            ) from error
        with contextlib.ExitStack() as owned:
            data = {
                **tree.data(),
                "preload": spec.preload,
                "memory_by_rlimit": spec.memory_by_rlimit,
                "arguments": self._arguments,
                "base": ids.claim(owned) if ids.is_host_root() else 0,
            }
            argv = [plan.interpreter(), "-I", "-S", str(Path(__file__).with_name("launcher.py"))]
            parent = forked.launch(argv, msgspec.json.encode(data), START_SECONDS, _explained)
            return ForkedTemplate(self.rung, self.boundary, parent, owned.pop_all())

    def probe(self) -> Unavailable | None:
        """Boot one machine for real, run one line in it, and look; None when it works."""
        return boots(lambda: self.start(TemplateSpec()), PROBE_SECONDS, _fix)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard one: each warm machine holds five descriptors here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _fix(failed: MachineFailed) -> str:
    return _USERNS_FIX if failed.step in {"clone", "maps"} else "report these words: the step is refused on this host"


def _explained(step: str, code: int, detail: str) -> CannotIsolate | HostFault:
    """Turn a failed step into the missing piece and its fix, where the errno tells."""
    if step in {"unshare", "maps", "clone"} and code in {errno.EPERM, errno.ENOSPC, errno.EINVAL, errno.EACCES}:
        return CannotIsolate(f"user namespaces are blocked on this host ({step}: {detail})", next_step=_USERNS_FIX)
    if step == "filter" and code == errno.EOPNOTSUPP:
        return CannotIsolate(
            "this kernel has no Landlock, or it is switched off",
            next_step="use Linux 5.13 or newer with landlock among the boot parameter lsm=",
        )
    if code == errno.ENOSYS:
        return CannotIsolate(
            f"this kernel lacks a call that the container rung needs ({step}: {detail})",
            next_step="use Linux 5.13 or newer",
        )
    if code == errno.EACCES and step.startswith("open"):
        return CannotIsolate(
            f"a part of the sandbox cannot be read by this user ({step}: {detail})",
            next_step="keep the interpreter and the package sets where this user can read them",
        )
    return HostFault(f"the template failed at {step}: {detail}", next_step="run `lockgate doctor`")
