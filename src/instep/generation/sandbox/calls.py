"""The seccomp filter of a program. libseccomp compiles it; a call that is not listed returns
ENOSYS.

Namespaces decide what a program sees. The filter leaves it fewer parts of the kernel to attack,
keeps it one process, and refuses memory that no limit counts: memfd, System V segments, message
queues, kernel keys, io_uring.
"""

from __future__ import annotations

import errno
import tempfile
from functools import lru_cache

from instep.extras import needed_by

FILES = """
    access chdir close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64 fallocate fchdir fdatasync flock
    fstat fstatfs fsync ftruncate getcwd getdents getdents64 getxattr fgetxattr lgetxattr listxattr flistxattr llistxattr
    inotify_add_watch inotify_init inotify_init1 inotify_rm_watch link linkat lseek lstat mkdir mkdirat newfstatat open openat openat2
    pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv rename renameat renameat2 rmdir sendfile
    stat statfs statx symlink symlinkat sync_file_range syncfs truncate umask unlink unlinkat write writev
"""
MEMORY = "brk madvise mincore mlock mlock2 mmap mprotect mremap msync munlock munmap"
WAITING = """
    epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 futex futex_requeue futex_wait
    futex_waitv futex_wake pause pipe pipe2 poll ppoll pselect6 select signalfd signalfd4 timerfd_create timerfd_gettime
    timerfd_settime
"""
PROCESS = """
    arch_prctl capget execve exit exit_group getegid geteuid getgid getgroups getpgid getpgrp getpid getppid getpriority getresgid
    getresuid getrlimit getrusage getsid gettid getuid membarrier restart_syscall rseq set_robust_list set_tid_address
    setsid wait4 waitid
    rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigtimedwait sigaltstack
    sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler
    sched_rr_get_interval sched_yield getcpu
"""
TIME = """
    alarm clock_getres clock_gettime clock_nanosleep getitimer gettimeofday nanosleep setitimer time timer_create timer_delete
    timer_getoverrun timer_gettime timer_settime times
"""
SYSTEM = "getrandom sysinfo uname"
PAIRS = "getpeername getsockname getsockopt recvfrom recvmmsg recvmsg sendmmsg sendmsg sendto setsockopt shutdown"
OWN = """
    chmod chown fchmod fchmodat fchmodat2 fchown fchownat lchown futimesat utime utimensat utimes
    kill rt_sigqueueinfo rt_tgsigqueueinfo tgkill tkill sched_setaffinity sched_setattr sched_setparam sched_setscheduler setpriority
"""
"""What reaches other processes and other files of one user: allowed where a program sees none but
its own."""

REFUSED = """
    add_key bpf fork io_uring_setup keyctl memfd_create mount perf_event_open pidfd_getfd pidfd_open pidfd_send_signal
    process_vm_readv process_vm_writev ptrace request_key setns shmget unshare userfaultfd vfork
"""
"""Not permitted, rather than not there: the clearer error."""

IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
"""All but those that name who is sent a signal (F_SETOWN, F_SETSIG), leases, and F_SETPIPE_SZ."""
PRCTLS = (3, 15, 16, 23, 30, 39, 0x53564D41)
"""The names of threads and of memory, and questions."""
THREAD, NAMESPACES = 0x10000, 0x7E020000 | 0x80
CORE = 4
"""A limit of 1 has the kernel write no core dump, also to a program that takes them; 0 does not do
that."""
STREAM, UNIX, INET, INET6 = 1, 1, 2, 10


@lru_cache
def compiled(*, network: bool, own: bool) -> bytes:
    """Returns the compiled filter, for `kernel.filter_calls`. own: whether the program has
    namespaces of its own. Raises `MissingExtra`, `RuntimeError`."""
    with needed_by("a sandbox"):
        import pyseccomp as seccomp
    calls = seccomp.SyscallFilter(seccomp.ERRNO(errno.ENOSYS))
    calls.set_attr(seccomp.Attr.CTL_OPTIMIZE, 2)

    def allow(name: str, *conditions: seccomp.Arg, action: int = seccomp.ALLOW) -> None:
        number = seccomp.resolve_syscall(seccomp.Arch.NATIVE, name)
        if number >= 0:  # other architectures and older libraries lack some
            calls.add_rule(action, number, *conditions)

    refuse = seccomp.ERRNO(errno.EPERM)
    for group in (FILES, MEMORY, WAITING, PROCESS, TIME, SYSTEM, PAIRS):
        for name in group.split():
            allow(name)
    for name in OWN.split():
        allow(name, action=seccomp.ALLOW if own else refuse)
    for name in REFUSED.split():
        allow(name, action=refuse)
    # clone3 does not exist: libc then uses clone, whose flags a filter can see.
    allow("clone", seccomp.Arg(0, seccomp.MASKED_EQ, THREAD | NAMESPACES, THREAD))
    allow("clone", seccomp.Arg(0, seccomp.MASKED_EQ, THREAD, 0), action=refuse)
    allow("prlimit64", seccomp.Arg(0, seccomp.EQ, 0), seccomp.Arg(1, seccomp.NE, CORE))
    allow("prlimit64", seccomp.Arg(0, seccomp.EQ, 0), seccomp.Arg(2, seccomp.EQ, 0))
    allow("setrlimit", seccomp.Arg(0, seccomp.NE, CORE))
    allow("socketpair", seccomp.Arg(0, seccomp.EQ, UNIX), seccomp.Arg(1, seccomp.MASKED_EQ, 15, STREAM))
    for name, position, values in (("ioctl", 1, IOCTLS), ("fcntl", 1, FCNTLS), ("prctl", 0, PRCTLS)):
        for value in values:
            allow(name, seccomp.Arg(position, seccomp.EQ, value))
    if network:
        allow("connect")
        for family in (INET, INET6):
            allow("socket", seccomp.Arg(0, seccomp.EQ, family))
    else:
        allow("socket", action=refuse)
    with tempfile.TemporaryFile() as file:
        calls.export_bpf(file)
        file.seek(0)
        return file.read()
