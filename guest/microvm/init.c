/* PID 1 of the guest until the agent takes its place: modules, root image, devices, ports, then exec.
 *
 * Rule 1: no libc and no heap: 64-bit system calls, fixed buffers. Whatever fails ends the machine (exit of PID 1 is a
 *         kernel panic, and `panic=-1` turns that into the end of the VMM).
 * Rule 2: the device tree of the kernel stays behind in the initramfs, where nothing can reach it after the move. The
 *         agent gets its ports as open descriptors, and a /dev with four harmless nodes.
 *
 * Built by `lockgate microvm build`:
 *   gcc -Os -static -nostdlib -ffreestanding -fno-pie -no-pie -fno-stack-protector -fno-asynchronous-unwind-tables
 * Sources: syscall numbers of arch/x86/entry/syscalls/syscall_64.tbl; mount(2), finit_module(2), ramfs-rootfs-initramfs.rst.
 */

enum {
    SYS_read = 0, SYS_write = 1, SYS_open = 2, SYS_close = 3, SYS_dup2 = 33, SYS_nanosleep = 35, SYS_execve = 59,
    SYS_exit = 60, SYS_chdir = 80, SYS_mkdir = 83, SYS_chmod = 90, SYS_umask = 95, SYS_mknod = 133, SYS_chroot = 161,
    SYS_mount = 165, SYS_finit_module = 313,
};
enum { O_RDONLY = 0, O_RDWR = 2, MS_RDONLY = 1, MS_NOSUID = 2, MS_NODEV = 4, MS_NOEXEC = 8, MS_REMOUNT = 32, MS_MOVE = 8192 };
enum { S_IFCHR = 0020000, EEXIST = 17, ENOENT = 2, TRIES = 3000, PORTS = 2 };

static long call(long n, long a, long b, long c, long d, long e)
{
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    __asm__ volatile("syscall" : "=a"(result) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8) : "rcx", "r11", "memory");
    return result;
}

static unsigned long length(const char *text)
{
    unsigned long n = 0;
    while (text[n])
        n++;
    return n;
}

static void say(const char *text)
{
    call(SYS_write, 2, (long)text, (long)length(text), 0, 0);
}

static void fail(const char *what)
{
    say("init: ");
    say(what);
    say("\n");
    call(SYS_exit, 70, 0, 0, 0, 0);
    for (;;)
        ;
}

static void need(long result, const char *what)
{
    if (result < 0)
        fail(what);
}

static void nap(void)
{
    long pause[2] = {0, 10 * 1000 * 1000};
    call(SYS_nanosleep, (long)pause, 0, 0, 0, 0);
}

static void directory(const char *path, long mode)
{
    long result = call(SYS_mkdir, (long)path, mode, 0, 0, 0);
    if (result < 0 && result != -EEXIST)
        fail(path);
}

static void fresh(const char *kind, const char *at, long flags, const char *options)
{
    need(call(SYS_mount, (long)kind, (long)at, (long)kind, flags, (long)options), at);
}

/* A device appears some milliseconds after its driver; it must be there within half a minute. */
static long device(const char *path)
{
    for (int i = 0; i < TRIES; i++) {
        long fd = call(SYS_open, (long)path, O_RDWR, 0, 0, 0);
        if (fd >= 0)
            return fd;
        nap();
    }
    fail(path);
    return -1;
}

/* `names` holds one file a line, in the order in which they must be loaded. A kernel with everything built in has none. */
static void modules(const char *names)
{
    static char list[4096];
    long fd = call(SYS_open, (long)names, O_RDONLY, 0, 0, 0);
    if (fd == -ENOENT)
        return;
    need(fd, names);
    long size = call(SYS_read, fd, (long)list, sizeof list - 1, 0, 0);
    need(size, names);
    list[size] = 0;
    call(SYS_close, fd, 0, 0, 0, 0);
    for (char *name = list; *name;) {
        char *end = name;
        while (*end && *end != '\n')
            end++;
        char *next = *end ? end + 1 : end;
        *end = 0;
        long file = call(SYS_open, (long)name, O_RDONLY, 0, 0, 0);
        need(file, name);
        long loaded = call(SYS_finit_module, file, (long)"", 0, 0, 0);
        if (loaded < 0 && loaded != -EEXIST)
            fail(name);
        call(SYS_close, file, 0, 0, 0, 0);
        name = next;
    }
}

static void image(const char *disk, const char *at)
{
    for (int i = 0; i < TRIES; i++) {
        if (call(SYS_mount, (long)disk, (long)at, (long)"erofs", MS_RDONLY | MS_NOSUID | MS_NODEV, 0) >= 0)
            return;
        nap();
    }
    fail(disk);
}

static int there(const char *path)
{
    long fd = call(SYS_open, (long)path, O_RDONLY, 0, 0, 0);
    if (fd >= 0)
        call(SYS_close, fd, 0, 0, 0, 0);
    return fd >= 0;
}

static void node(const char *path, int major, int minor)
{
    need(call(SYS_mknod, (long)path, S_IFCHR | 0666, (major << 8) | minor, 0, 0), path);
    need(call(SYS_chmod, (long)path, 0666, 0, 0, 0), path);
}

static void ports(void)
{
    static char path[] = "/kernel/vport0p1";
    for (int i = 0; i < PORTS; i++) {
        path[sizeof path - 2] = (char)('1' + i);
        long fd = device(path); /* 0, 1 and 2 are taken, so the ports become 3 and 4 */
        if (fd != 3 + i)
            fail("a port has the wrong descriptor");
    }
}

static void standard(void)
{
    for (int fd = 0; fd < 3; fd++) { /* the console, or nothing at all where there is none */
        long null = call(SYS_open, (long)"/kernel/null", O_RDWR, 0, 0, 0);
        if (null < 0)
            fail("/dev/null");
        if (null >= 3) {
            call(SYS_close, null, 0, 0, 0, 0);
            return;
        }
    }
}

/* `vsock`: this machine has virtio sockets, on which the agent listens, and no ports. */
__attribute__((noreturn)) static void run(int vsock)
{
    char *const argv[] = {"/usr/bin/python3", "-I", "-S", "-B", "/tmp/agent.py", vsock ? "vsock" : 0, 0};
    static char *const environment[] = {"OPENBLAS_NUM_THREADS=1", "OMP_NUM_THREADS=1", "MKL_NUM_THREADS=1",
                                        "NUMEXPR_NUM_THREADS=1", 0};
    call(SYS_umask, 022, 0, 0, 0, 0);
    directory("/kernel", 0700);
    directory("/image", 0755);
    fresh("devtmpfs", "/kernel", MS_NOSUID | MS_NOEXEC, "");
    standard();
    modules("/modules");
    if (vsock)
        modules("/modules.vsock");
    /* The order of two disks is the machine's affair: the root image is the one that has the agent. */
    const char *packages = "/kernel/vdb";
    image("/kernel/vda", "/image");
    if (!there("/image/tmp/agent.py")) {
        packages = "/kernel/vda";
        image("/kernel/vdb", "/image"); /* over the other one, which is mounted again where it belongs */
    }
    if (!vsock)
        ports();
    fresh("tmpfs", "/image/dev", MS_NOSUID | MS_NOEXEC, "size=4k,nr_inodes=8,mode=755");
    node("/image/dev/null", 1, 3);
    node("/image/dev/zero", 1, 5);
    node("/image/dev/random", 1, 8);
    node("/image/dev/urandom", 1, 9);
    fresh("tmpfs", "/image/dev", MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NOEXEC, "");
    fresh("cgroup2", "/image/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "");
    if (there(packages))
        image(packages, "/image/packages"); /* the agent checks that it is there when it must be */
    need(call(SYS_chdir, (long)"/image", 0, 0, 0, 0), "chdir");
    need(call(SYS_mount, (long)".", (long)"/", 0, MS_MOVE, 0), "move");
    need(call(SYS_chroot, (long)".", 0, 0, 0, 0), "chroot");
    need(call(SYS_chdir, (long)"/", 0, 0, 0, 0), "chdir");
    need(call(SYS_execve, (long)argv[0], (long)argv, (long)environment, 0, 0), "python3");
    for (;;)
        ;
}

static int same(const char *one, const char *other)
{
    while (*one && *one == *other) {
        one++;
        other++;
    }
    return *one == *other;
}

/* The stack of a new program: argc, argv[0], ... What the kernel's command line has behind `--` comes last. */
__asm__(".globl _start\n_start:\n\txor %ebp, %ebp\n\tmov %rsp, %rdi\n\tand $-16, %rsp\n\tcall begin\n");
__attribute__((noreturn, used)) void begin(const long *stack)
{
    run(stack[0] > 1 && same((const char *)stack[stack[0]], "vsock"));
}
