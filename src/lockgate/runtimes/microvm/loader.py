"""The loader: one process a template, parent of its machines. Starts VMMs in their cages, moves bytes, reaps.

Rule 1: it holds nothing of a run but the bytes on their way. After the handshake every byte of a guest is hostile: a
        frame's kind and length are checked before its payload is kept, and what it says is not looked into.
Rule 2: one thread, one poll set; nothing waits without a deadline. A guest that does not read holds up itself alone.
Rule 3: the handshake is mandatory. No byte of a run's code goes to a guest that has not answered it.
Rule 4: it ends with its lifeline, and every machine ends with it (PDEATHSIG, and its pid namespace with the VMM).

Started by `forked.launch` as `... loader CTL LIFELINE PLAN`; the protocol on CTL is that of `runtimes.forked`. Control
of a machine, from the supervisor: u32 length and JSON of the run's bounds, then what `dialog` says. To the supervisor:
`dialog`'s R line once it is loaded; "A" + JSON + newline once the handshake is done (or "F"); then lines "S" + JSON
with what the agent saw of the worker, and the worker's own bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from lockgate.kernel import mounts_unsafe as mounts
from lockgate.kernel import process_unsafe as process
from lockgate.runtimes import dialog, ids
from lockgate.runtimes.microvm import cage, qemu, snapshot
from lockgate.runtimes.microvm.firecracker import jail, shim
from lockgate.runtimes.microvm.firecracker.machine import ident
from lockgate.runtimes.microvm.machines import Vm
from lockgate.runtimes.microvm.poll import IN, Poll
from lockgate.runtimes.microvm.vmm import Plan

_IDS: Final = 60_000
_FDS: Final = {name: number for name, number in qemu.FDS.items() if name not in {"control", "call", "monitor", "state"}}


class Loader:
    """Serves requests until its lifeline ends. `step` names what is being done, for the error of a failure."""

    def __init__(self, plan: Plan, ctl: socket.socket, lifeline: int) -> None:
        self.plan = plan
        self.ctl = ctl
        self.lifeline = lifeline
        self.step = "start"
        self.poll = Poll()
        self.vms: set[Vm] = set()
        self.last = -1
        self.files: dict[str, int] = {}
        self.state = -1
        self.tree = ""
        self.yard: Path | None = None
        self.cages: dict[int, jail.Jail] = {}
        self.targets = (-1, -1)

    # ---- once ----------------------------------------------------------------------------------------------------
    def prepare(self) -> None:
        """Open what every machine gets, then make the cage's tree in a mount namespace of our own."""
        guest = self.plan.guest
        if self.plan.vmm == "firecracker":  # its jailer makes the cages, from files that are opened by name
            self.step = "root"
            jail.need_root()
            self.step = "yard"
            self.yard = jail.yard(Path(self.plan.yard))
            return
        for name, path in (("kernel", guest.kernel), ("initrd", guest.initrd), ("root", guest.root),
                           ("packages", guest.packages)):  # fmt: skip
            if path is not None:
                self.step = f"open {name}"
                self.files[name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.step = "memory"
        if self.plan.mode == "serve":
            self.files["ram"] = snapshot.sealed(self.plan.ram, guest.memory)
            self.state = snapshot.sealed(self.plan.state, None)
        else:
            self.files["ram"] = snapshot.fresh(guest.memory)
            self.targets = (snapshot.target(self.plan.ram), snapshot.target(self.plan.state))
        self.step = "unshare"
        uid, gid = os.getuid(), os.getgid()
        if self.plan.base:
            os.setgroups([])
            process.unshare(process.NEWNS)
        else:
            process.unshare(process.NEWUSER | process.NEWNS)
            process.set_dumpable(1)
            for name, line in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
                Path(f"/proc/self/{name}").write_text(line, encoding="ascii")
        self.step = "tree"
        mounts.make_private("/")
        devices = ("null", "zero", "urandom", *(("kvm",) if self.plan.accel == "kvm" else ()))
        self.tree = cage.build_tree(self.plan.view, devices, root=self.plan.base > 0)

    def start(self, number: int, given: dict[str, int], *, cold: bool) -> tuple[int, int]:
        """Start one VMM in its cage: (pid, pidfd). `given`: its own descriptors by name, "words" for what it writes."""
        self.step = "clone"
        if self.yard is not None:
            one = jail.Jail(self.yard, ident(), self.plan.base + number)
            pid, pidfd = process.clone_slot(shim.NAMESPACES)
            if pid == 0:
                shim.run(self.plan, one, given, cold=cold)
            self.cages[pid] = one
            return pid, pidfd
        descriptors = {qemu.FDS[name]: fd for name, fd in {**self.files, **given}.items() if name != "words"}
        program = qemu.program(self.plan, cold=cold)
        go_read, go_write = os.pipe()
        try:
            pid, pidfd = process.clone_slot()
            if pid == 0:
                os.close(go_write)
                words = {1: given["words"], 2: given["words"]}
                writes = snapshot.STATE_BYTES if cold else 0
                cage.enter(self.tree, program, {**words, **descriptors}, go_read, writes=writes)
            self.step = "maps"
            outside = self.plan.base + number if self.plan.base else 0
            for name, line in (("setgroups", "deny"), ("uid_map", f"0 {outside} 1"), ("gid_map", f"0 {outside} 1")):
                Path(f"/proc/{pid}/{name}").write_text(line, encoding="ascii")
            with contextlib.suppress(BrokenPipeError):  # it died on its own; its pidfd tells
                os.write(go_write, b"g")
        finally:
            os.close(go_read)
            os.close(go_write)
        return pid, pidfd

    # ---- requests ------------------------------------------------------------------------------------------------
    def serve(self) -> NoReturn:
        """Answer requests and drive the machines."""
        self.ctl.setblocking(False)
        self.poll.watch(self.ctl.fileno(), IN, lambda _mask: self._on_ctl())
        self.poll.watch(self.lifeline, IN, lambda _mask: self._end())
        self._send({"ready": {"vmm": self.plan.vmm, "accel": self.plan.accel}})
        while True:
            deadlines = [vm.deadline for vm in self.vms if vm.deadline is not None]
            self.poll.turn(min(deadlines) - time.monotonic() if deadlines else None)
            now = time.monotonic()
            for vm in [vm for vm in self.vms if vm.deadline is not None and vm.deadline <= now]:
                vm.late()

    def _on_ctl(self) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(self.ctl, dialog.CTL_BYTES, dialog.MACHINE_DESCRIPTORS)
        except BlockingIOError:
            return
        if not message:
            self._end()
        try:
            self._spawn(fds)
        except (OSError, ValueError) as error:
            code = getattr(error, "errno", None) or 0
            self._send({"error": self.step, "errno": code, "detail": f"{type(error).__name__}: {error}"[:1000]})
            for fd in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def _spawn(self, fds: list[int]) -> None:
        """Start a machine on the descriptors of a request, and say so: it is loaded later."""
        if len(fds) != dialog.MACHINE_DESCRIPTORS:
            raise OSError(errno.EBADF, f"{len(fds)} descriptors with a request")
        channel, control, out, err = fds
        self.step = "ids"
        number = ids.number_of({vm.number for vm in self.vms}, self.last, _IDS)
        self.last = number
        guest, guest_end = socket.socketpair()
        wire, wire_end = socket.socketpair()
        words, words_end = os.pipe2(os.O_CLOEXEC)
        given = {
            "control": guest_end.fileno(), "call": channel, "monitor": wire_end.fileno(), "words": words_end,
        }  # fmt: skip
        if self.state >= 0:  # each reads it from an offset of its own
            given["state"] = os.open(f"/proc/self/fd/{self.state}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            pid, pidfd = self.start(number, given, cold=False)
        except BaseException:
            guest.close()
            wire.close()
            os.close(words)
            raise
        finally:
            guest_end.close()
            wire_end.close()
            os.close(words_end)
            if "state" in given:
                os.close(given["state"])
        os.close(channel)
        self.vms.add(
            Vm(
                self.poll,
                pid=pid,
                pidfd=pidfd,
                number=number,
                monitor=qemu.Monitor(cold=False) if self.yard is None else shim.Monitor(),
                begin=b"" if self.yard is None else shim.START,
                wire=wire,
                guest=guest,
                words=words,
                control=socket.socket(fileno=control),
                out=out,
                err=err,
                lease_seconds=self.plan.lease_seconds,
                facts={"vmm": self.plan.vmm, "accel": self.plan.accel},
                gone=self._over,
            )
        )
        self._send({"spawned": pid}, (pidfd,))

    def _over(self, vm: Vm) -> None:
        """A machine is reaped: take its cage away."""
        self.vms.discard(vm)
        self.clear(vm.pid)

    def clear(self, pid: int) -> None:
        """Take away the cage of a VMM that is reaped."""
        cage_of = self.cages.pop(pid, None)
        if cage_of is not None:
            shutil.rmtree(cage_of.root.parent, ignore_errors=True)

    def _send(self, message: dict[str, object], fds: tuple[int, ...] = ()) -> None:
        """Send one message to the supervisor, which always reads."""
        data = json.dumps(message).encode()
        self.ctl.setblocking(True)
        self.ctl.settimeout(10.0)
        try:
            if fds:
                socket.send_fds(self.ctl, [data], fds)
            else:
                self.ctl.send(data)
        finally:
            self.ctl.setblocking(False)

    def _end(self) -> NoReturn:
        """The supervisor is gone: so is everything here."""
        for vm in list(self.vms):
            vm.kill()
        if self.yard is not None:
            jail.leave(self.yard)
        os._exit(0)


def main() -> NoReturn:
    """Make a snapshot or serve machines; a failure is one message on ctl and exit status 99."""
    ctl_fd, lifeline, plan_fd = (int(one) for one in sys.argv[1:4])
    for fd in (ctl_fd, lifeline, plan_fd):
        fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    ctl = socket.socket(fileno=ctl_fd)
    loader: Loader | None = None
    process.die_with_parent()
    try:
        with open(plan_fd, "rb") as file:  # noqa: PTH123 - a descriptor
            plan = msgspec.json.decode(file.read(), type=Plan)
        os.umask(0o022)
        loader = Loader(plan, ctl, lifeline)
        loader.prepare()
        if plan.mode == "serve":
            loader.serve()
        facts = snapshot.make(loader)
        ctl.send(json.dumps({"ready": facts}).encode())
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the supervisor must hear of it
        code = error.errno if isinstance(error, OSError) and error.errno else 0
        detail = f"{type(error).__name__}: {error}"[:1000]
        with contextlib.suppress(OSError):
            ctl.send(json.dumps({"error": loader.step if loader else "plan", "errno": code, "detail": detail}).encode())
    os._exit(dialog.STATUS_HARDENING_FAILED)


if __name__ == "__main__":
    main()
