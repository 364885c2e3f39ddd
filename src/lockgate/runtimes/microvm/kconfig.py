"""The configuration of the small guest kernel: what is on, what must be off, as options of Kconfig.

Rule 1: no module loader, no network but virtio sockets, no PCI, no ACPI, no key ring, no BPF, no namespaces but those
        of processes: what the guest does not need is not there to be attacked from inside.
Rule 2: `kernels.check_config` holds the finished file to these lists.
"""

from __future__ import annotations

from typing import Final

_ON: Final = """64BIT HYPERVISOR_GUEST PARAVIRT PVH KVM_GUEST X86_MPPARSE RELOCATABLE HIGH_RES_TIMERS NO_HZ_IDLE HZ_100
CC_OPTIMIZE_FOR_PERFORMANCE BUG UNWINDER_GUESS PRINTK PRINTK_TIME TTY RANDOM_TRUST_CPU BLOCK BLK_DEV BLK_DEV_INITRD
RD_GZIP VIRTIO_MENU VIRTIO VIRTIO_MMIO VIRTIO_MMIO_CMDLINE_DEVICES VIRTIO_BLK VIRTIO_CONSOLE HW_RANDOM
HW_RANDOM_VIRTIO NET UNIX VSOCKETS VIRTIO_VSOCKETS MISC_FILESYSTEMS EROFS_FS DEVTMPFS PROC_FS PROC_SYSCTL SYSCTL
SYSFS TMPFS SHMEM BINFMT_ELF BINFMT_SCRIPT MULTIUSER EPOLL FUTEX SIGNALFD TIMERFD EVENTFD POSIX_TIMERS FILE_LOCKING
ADVISE_SYSCALLS MEMBARRIER RSEQ SECCOMP SECCOMP_FILTER CGROUPS MEMCG CGROUP_PIDS PANIC_ON_OOPS SECURITY
SECURITY_LANDLOCK SERIAL_8250 SERIAL_8250_CONSOLE NAMESPACES PID_NS"""
_OFF: Final = """SMP INET ACPI PCI RANDOMIZE_BASE X86_X2APIC SERIO_I8042 RETPOLINE CPU_MITIGATIONS
SPECULATION_MITIGATIONS POSIX_MQUEUE SYSVIPC KERNEL_LZ4 VSOCKETS_LOOPBACK SWAP LEGACY_PTYS VT HW_RANDOM_VIA AIO
UTS_NS IPC_NS USER_NS NET_NS TIME_NS CGROUP_NS"""
# Off in tinyconfig already; asserted, so that a later source cannot bring them back unseen.
_MUST_BE_OFF: Final = """MODULES IO_URING BPF_SYSCALL KEYS USERFAULTFD DEVMEM NETDEVICES PACKET KEXEC
CHECKPOINT_RESTORE"""

ON: Final = tuple(_ON.split())
OFF: Final = tuple(_OFF.split())
MUST_BE_OFF: Final = tuple(_MUST_BE_OFF.split())


def fragment() -> str:
    """Return the lines that are merged into tinyconfig."""
    on = "".join(f"CONFIG_{name}=y\n" for name in ON)
    off = "".join(f"# CONFIG_{name} is not set\n" for name in OFF)
    return on + off + 'CONFIG_PANIC_TIMEOUT=-1\nCONFIG_LSM="landlock"\n'
