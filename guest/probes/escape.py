"""Escape: leave the sandbox's view, undo its hardening, run code that was not brought in."""

CLONE = {"NEWUSER": 0x10000000, "NEWNS": 0x20000, "NEWNET": 0x40000000, "NEWPID": 0x20000000, "NEWIPC": 0x08000000,
         "NEWUTS": 0x04000000, "NEWCGROUP": 0x02000000, "NEWTIME": 0x80}  # fmt: skip
for _name, _flag in CLONE.items():
    probe("unshare-" + _name.lower(), "Escape", last=True)(
        lambda flag=_flag: answered("unshare", flag)
    )


@probe("clone-newuser", "Escape")
def _():
    got, number = syscall("clone", CLONE["NEWUSER"] | 17, 0, 0, 0, 0)
    if got == 0:
        os._exit(0)
    return got > 0 or number not in (E["EPERM"], E["ENOSYS"]), number


@probe("clone3-newuser", "Escape")
def _():
    args = struct.pack("<11Q", CLONE["NEWUSER"], 0, 0, 0, 17, 0, 0, 0, 0, 0, 0)
    got, number = syscall("clone3", ctypes.c_char_p(args), 88)
    if got == 0:
        os._exit(0)
    return got > 0 or number not in (E["EPERM"], E["ENOSYS"]), number


probe("setns", "Escape")(lambda: answered("setns", 1023, 0))
probe("mount-tmpfs", "Escape")(lambda: answered("mount", b"none", b".", b"tmpfs", 0, 0))
probe("mount-proc", "Escape")(lambda: answered("mount", b"proc", b".", b"proc", 0, 0))
probe("mount-cgroup", "Escape")(lambda: answered("mount", b"cgroup", b".", b"cgroup", 0, b"memory"))
probe("mount-bad-fs", "Escape")(lambda: answered("mount", b"none", b".", b"no-such-fs", 0, 0))
probe("umount-proc", "Escape", last=True)(lambda: answered("umount2", b"/proc", 8))
probe("remount-root-rw", "Escape", last=True)(lambda: answered("mount", 0, b"/", 0, 32 | 4096, 0))
probe("fsopen", "Escape")(lambda: answered("fsopen", b"tmpfs", 1))
probe("fsconfig", "Escape")(lambda: answered("fsconfig", -1, 0, 0, 0, 0))
probe("fsmount", "Escape")(lambda: answered("fsmount", -1, 0, 0))
probe("fspick", "Escape")(lambda: answered("fspick", -1, b"", 0))
probe("open-tree", "Escape")(lambda: answered("open_tree", -100, b".", 0))
probe("open-tree-clone", "Escape")(lambda: answered("open_tree", -100, b".", 1))
probe("move-mount", "Escape")(lambda: answered("move_mount", -1, b"", -1, b"", 4))
probe("mount-setattr", "Escape")(lambda: answered("mount_setattr", -1, b"", 0x1000, ctypes.c_char_p(b"\0" * 32), 32))
probe("pivot-root", "Escape", last=True)(lambda: answered("pivot_root", b".", b"."))
probe("chroot", "Escape", last=True)(lambda: answered("chroot", b"."))
probe("setuid-0", "Escape")(lambda: (os.setuid(0) is None and os.getuid() == 0 and open("/proc/1/mem", "rb"), "uid 0"))
probe("setuid-call", "Escape")(lambda: answered("setuid", 54321, refusals=("EPERM", "ENOSYS")))
probe("capset", "Escape")(
    lambda: answered("capset", ctypes.c_char_p(struct.pack("<Ii", 0x20080522, 0)), ctypes.c_char_p(b"\0" * 24))
)
probe("prctl-dumpable", "Escape", last=True)(lambda: answered("prctl", 4, 1, 0, 0, 0))
probe("prctl-ambient", "Escape")(lambda: answered("prctl", 47, 4, 0, 0, 0))
probe("prctl-set-mm", "Escape")(lambda: answered("prctl", 35, 99, 0, 0, 0))
probe("prctl-pdeathsig", "Escape", last=True)(lambda: answered("prctl", 1, 0, 0, 0, 0))
probe("prctl-mdwe", "Escape")(lambda: answered("prctl", 66, 0, 0, 0, 0))
probe("seccomp-install", "Escape", last=True)(lambda: answered("seccomp", 1, 0, 0))
probe("landlock-create", "Escape")(lambda: answered("landlock_create_ruleset", 0, 0, 1))
probe("personality-rwx", "Escape", last=True)(lambda: answered("personality", 0x0400000))
probe("chown", "Escape")(lambda: answered("chown", b"/no-such-file", -1, -1))
probe("execveat", "Escape")(lambda: answered("execveat", -1, b"", 0, 0, 0x1000))
probe("memfd-create", "Escape")(lambda: answered("memfd_create", b"p", 1))
probe("x32-getpid", "Escape")(lambda: answered(0x40000000 + 39, refusals=("ENOSYS", "EPERM")))
probe("modify-ldt", "Escape")(lambda: answered("modify_ldt", 99, 0, 0, refusals=("EPERM",)))


@probe("int80", "Escape")
def _():
    # mov eax, 20 (getpid); int 0x80; ret - run from a file mapping, which the rung should refuse first
    import mmap

    code = b"\xb8\x14\x00\x00\x00\xcd\x80\xc3"
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    where = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return ctypes.CFUNCTYPE(ctypes.c_int)(where)() > 0, "answered"


@probe("rwx-mapping", "Escape")
def _():
    import mmap

    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()
    return True, "mapped"


@probe("rwx-mprotect", "Escape")
def _():
    import mmap

    page = mmap.mmap(-1, 4096)
    where = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return answered("mprotect", where & ~4095, 4096, 7)


@probe("exec-interpreter", "Escape")
def _():
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.dup2(writer, 1)
        os.execv(sys.executable or "/usr/bin/python3", ["python3", "-I", "-S", "-c", "print('ran')"])
    os.close(writer)
    return b"ran" in os.read(reader, 16), "exec"


def _copy(name):
    source = os.path.realpath(sys.executable or "/usr/bin/python3")
    with open(source, "rb") as given, open(name, "wb") as taken:
        taken.write(given.read())
    os.chmod(name, 0o700)
    return os.path.abspath(name)


def _execs(argv):
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.dup2(writer, 1)
        os.close(2)
        os.execv(argv[0], argv)
    os.close(writer)
    return b"ran" in os.read(reader, 16), argv[0]


@probe("exec-copied-interpreter", "Escape")
def _():
    return _execs([_copy("copied-python"), "-I", "-S", "-c", "print('ran')"])


@probe("exec-through-loader", "Escape")
def _():
    loader = "/lib64/ld-linux-x86-64.so.2"
    return _execs([loader, _copy("loaded-python"), "-I", "-S", "-c", "print('ran')"])


@probe("exec-script", "Escape")
def _():
    with open("script", "w") as handle:
        handle.write("#!/bin/sh\necho ran\n")
    os.chmod("script", 0o700)
    return _execs([os.path.abspath("script")])


@probe("subprocess-shell", "Escape")
def _():
    import subprocess

    done = subprocess.run(["/bin/sh", "-c", "echo ran"], stdout=subprocess.PIPE, timeout=2)
    return b"ran" in done.stdout, "ran"


@probe("exec-memfd", "Escape")
def _():
    fd = os.memfd_create("p")
    with open(os.path.realpath(sys.executable or "/usr/bin/python3"), "rb") as given:
        os.write(fd, given.read())
    return _execs(["/proc/self/fd/%d" % fd, "-I", "-S", "-c", "print('ran')"])


@probe("dlopen-copied-library", "Escape")
def _():
    import _ctypes

    with open(_ctypes.__file__, "rb") as given, open("copied.so", "wb") as taken:
        taken.write(given.read())
    ctypes.CDLL(os.path.abspath("copied.so"))
    return True, "mapped"


@probe("leaked-directory-fd", "Escape")
def _():
    import stat

    for fd in range(3, 1024):
        try:
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                return True, "fd %d is a directory" % fd
        except OSError:
            pass
    return False, "none"


@probe("leaked-fds", "Escape")
def _():
    extra = []
    for fd in range(5, 1024):
        try:
            os.fstat(fd)
        except OSError:
            continue
        extra.append(fd)
    # the pipe to the probing parent is ours: one writer
    return len(extra) > 1, extra[:8]


@probe("cwd-outside", "Escape")
def _():
    return os.getcwd().startswith("(unreachable)") or present("../../../../../../root")[0], os.getcwd()


for _path in ("/proc/self/exe", "/proc/1/exe", sys.executable or "/usr/bin/python3", os.__file__):
    probe("write-" + os.path.basename(_path).replace(".", "-") + ("-1" if "/1/" in _path else ""), "Escape")(
        lambda path=_path: writable(path)
    )
for _path in ("/", "/usr", "/dev", "/etc", "/tmp", "/var", "/home"):
    probe("create-in-" + (_path.strip("/") or "root"), "Escape")(
        lambda path=_path: (os.access(path, os.W_OK), "access(W_OK)")
    )
probe("open-by-handle-at", "Escape")(
    lambda: answered("open_by_handle_at", -1, ctypes.c_char_p(struct.pack("<Ii", 8, 1) + b"\0" * 8), 0, refusals=("EPERM", "ENOSYS", "EACCES"))
)
probe("name-to-handle-at", "Escape")(lambda: answered("name_to_handle_at", -1, b"x", 0, 0, 0))
probe("mknod-char", "Escape")(lambda: answered("mknod", b"node", 0o020600, os.makedev(1, 3)))
probe("mknod-fifo", "Escape")(lambda: answered("mknod", b"fifo", 0o010600, 0))
