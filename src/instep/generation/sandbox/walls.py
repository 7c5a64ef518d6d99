"""Isolates a program from the machine. The keeper imports this module: standard library only.

full: a program has a file system, processes, a network and a user of its own. `build_root` makes
the file system once, of this interpreter's folders and the system's libraries, read-only. Each
program gets a copy of it with one folder to write in.
partial: a program sees the machine. Landlock and the filter refuse what it does to it.
"""

import os
import resource
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instep.generation.sandbox import kernel
else:
    import kernel

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
SETTINGS = (
    "alternatives", "gai.conf", "host.conf", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types",
    "nsswitch.conf", "pki/ca-trust", "pki/tls/certs", "protocols", "resolv.conf", "services", "ssl/certs", "ssl/openssl.cnf", "timezone",
)  # fmt: skip
DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))
PRIVATE = "/sandbox"
"""The folder that a program may write in: a file system of its own, in memory, of a bounded
size."""
MOST_FILES = 16384
THREADS = 128
OPEN_FILES = 256
FIRST_USER, USERS, NOBODY = 61184, 4000, 65534
"""Users that nobody is: systemd keeps this range for services that last for a moment. Containers
may lack it, but not NOBODY."""
EVERYTHING = (
    kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWNET | kernel.CLONE_NEWCGROUP
)
NEW_ROOT = "/tmp"
"""The mount point of the new root while it is built."""


def build_root(folders: list[str]) -> None:
    """Gives this process a root directory of the system's libraries and `folders`, read-only, and
    nothing else."""
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    links = {path: os.readlink(path) for path in (*SYSTEM, *folders) if os.path.islink(path)}
    shown = [path for path in (*SYSTEM, *folders, *settings(), *DEVICES, "/proc") if path not in links and os.path.exists(path)]
    sources = {path: os.open(path, os.O_PATH) for path in shown}  # by number: NEW_ROOT soon covers some of the names
    folder = {path: os.path.isdir(path) for path in shown}
    kernel.mount("sandbox", NEW_ROOT, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=4m")
    os.chdir(NEW_ROOT)
    for path, target in links.items():
        _link(path, target)
    for path, source in sources.items():
        _show(path, f"/proc/self/fd/{source}", folder[path])
        os.close(source)
    os.makedirs("." + PRIVATE)
    for path in ("/tmp", "/var/tmp", "/dev/shm"):
        _link(path, PRIVATE)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        _link(f"/dev/{name}", f"/proc/self/{target}")
    kernel.pivot_root(".", ".")
    kernel.umount(".", kernel.MNT_DETACH)
    os.chdir("/")
    kernel.mount("none", "/", None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV)


def settings() -> list[str]:
    return [f"/etc/{name}" for name in SETTINGS]


def _link(path: str, target: str) -> None:
    if not os.path.lexists("." + path):
        os.makedirs(os.path.dirname("." + path), exist_ok=True)
        os.symlink(target, "." + path)


def _show(path: str, source: str, is_folder: bool) -> None:
    target = "." + path
    if is_folder:
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o444))
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)
    if path != "/proc":  # the keeper writes there; each program covers it with its own
        kernel.make_read_only(target, devices=path in DEVICES)


def user_of(number: int) -> int:
    """Returns the user id of the program with this number."""
    return FIRST_USER + number % USERS


def become_user(number: int) -> None:
    """Makes this process a user that nothing else runs as. Does nothing unless root calls it."""
    if os.geteuid() != 0:
        return
    kernel.drop_bounds()
    os.setgroups([])
    for user in (user_of(number), NOBODY):
        try:
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            break
        except OSError:
            if user == NOBODY:
                raise
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # else root owns what is in /proc/self


def enter_namespaces(network: bool, users: bool = True) -> None:
    """Gives this process namespaces of its own. The PID namespace begins with its next child."""
    user, group = os.getuid(), os.getgid()
    kernel.unshare((EVERYTHING & ~(kernel.CLONE_NEWNET if network else 0)) | (kernel.CLONE_NEWUSER if users else 0))
    if users:
        map_user(user, group)
    kernel.sethostname("sandbox")


def map_user(user: int, group: int) -> None:
    """Maps the only user of a new user namespace to the one outside."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def mount_private(disk: int, number: int | None) -> None:
    """Mounts a program's own /proc and folder. The first process of its namespace calls this.

    number: of the program that root starts where there are no user namespaces: root mounts, then
    becomes its user.
    """
    hidden = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    try:
        kernel.mount("proc", "/proc", "proc", hidden)
    except OSError:  # where a container covers parts of its /proc, the kernel gives nobody within a new one
        kernel.mount("none", "/proc", "tmpfs", hidden | kernel.MS_RDONLY, "size=4k,mode=555")
    user, group = (os.geteuid(), os.getegid()) if number is None else (user_of(number), user_of(number))
    options = f"mode=700,size={disk},nr_inodes={MOST_FILES},uid={user},gid={group}"
    kernel.mount("sandbox", PRIVATE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    if number is not None:
        become_user(number)


def limit(job: dict[str, Any], own: bool) -> None:
    """Sets the kernel's limits for this process and the program it becomes. own: whether its
    user has no other processes."""
    limits = {
        resource.RLIMIT_AS: job["memory"], resource.RLIMIT_FSIZE: job["file"], resource.RLIMIT_CORE: 1,
        resource.RLIMIT_NOFILE: OPEN_FILES, resource.RLIMIT_MSGQUEUE: 0, resource.RLIMIT_MEMLOCK: 0,
    }  # fmt: skip
    if own:
        limits[resource.RLIMIT_NPROC] = THREADS
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def end_with_parent(alive: int) -> None:
    """Makes the kernel kill this process when its parent dies. alive: a pipe to the parent,
    which shows whether it has died already."""
    import select

    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    poll = select.poll()
    poll.register(alive, 0)
    if poll.poll(0):
        os._exit(127)
