"""Calls of the Linux kernel that Python's standard library lacks. Imported by the keeper: standard
library only."""

import ctypes
import os
import re
import struct
from typing import Any

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 0x20, 0x1000, 0x4000, 1 << 18
FLAGS = {
    b"ro": MS_RDONLY, b"nosuid": MS_NOSUID, b"nodev": MS_NODEV, b"noexec": MS_NOEXEC,
    b"noatime": 1 << 10, b"nodiratime": 1 << 11, b"relatime": 1 << 21,
}  # fmt: skip
"""Those that a mount may have to keep, by their names in mountinfo."""
ESCAPED = re.compile(rb"\\([0-7]{3})")
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION_3 = 0x20080522

# Since Linux 4.16 a new call has one number everywhere. PIVOT_ROOT is older.
MOUNT_SETATTR, LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 442, 444, 445, 446
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = -100, 0x8000, 1, 2, 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _checked(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _call(what: str, number: int, *arguments: Any) -> int:
    words = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    return _checked(what, _libc.syscall(ctypes.c_long(number), *words))


def unshare(flags: int) -> None:
    _checked("unshare", _libc.unshare(flags))


def sethostname(name: str) -> None:
    _checked("sethostname", _libc.sethostname(name.encode(), len(name)))


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    kind_bytes = kind.encode() if kind else None
    words = (os.fsencode(source), os.fsencode(target), kind_bytes, ctypes.c_ulong(flags), data.encode())
    _checked(f"mount {kind or source} on {target}", _libc.mount(*words))


def umount(target: str, flags: int = 0) -> None:
    _checked(f"umount {target}", _libc.umount2(os.fsencode(target), flags))


def pivot_root(new: str, old: str) -> None:
    _call("pivot_root", PIVOT_ROOT[os.uname().machine], os.fsencode(new), os.fsencode(old))


def make_read_only(target: str, devices: bool = False) -> None:
    """Makes a mount, and all below it, read-only, without setuid programs, and without devices
    unless `devices`."""
    flags = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | (0 if devices else MOUNT_ATTR_NODEV)
    attributes = struct.pack("QQQQ", flags, 0, 0, 0)
    words = (AT_FDCWD, os.fsencode(target), AT_RECURSIVE, attributes, len(attributes))
    try:
        _call(f"mount_setattr {target}", MOUNT_SETATTR, *words)
    except OSError:  # Linux before 5.12, and containers that know no newer call
        for point, kept in mounts_below(os.path.abspath(target)):
            mount("none", point, None, MS_REMOUNT | MS_BIND | kept | MS_RDONLY | MS_NOSUID | (0 if devices else MS_NODEV))


def mounts_below(target: str) -> list[tuple[str, int]]:
    """Returns each mount point at a path and below it, with its flags."""
    found: dict[str, int] = {}
    with open("/proc/self/mountinfo", "rb") as lines:
        for line in lines:
            words = line.split()
            point = os.fsdecode(ESCAPED.sub(lambda match: bytes([int(match[1], 8)]), words[4]))
            if f"{point}/".startswith(f"{target}/"):
                found[point] = sum(FLAGS.get(option, 0) for option in words[5].split(b","))
    return list(found.items())


def prctl(option: int, *values: int) -> None:
    """Calls `prctl` with values as machine words: the kernel insists that unused ones are 0."""
    words = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    _checked(f"prctl {option}", _libc.prctl(option, *words))


def drop_capabilities() -> None:
    """Drops all capabilities, for the programs that this process starts too: none of them gains
    privileges."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    drop_bounds()
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    _checked("capset", _libc.capset(header, bytes(24)))


def drop_bounds() -> None:
    """Drops the capabilities that programs of this process might gain."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # there is no such capability, or this process has lost the right to drop any
            return


def filter_calls(program: bytes) -> None:
    """Loads a compiled seccomp filter. Needs `drop_capabilities` before it."""
    code = ctypes.create_string_buffer(program, len(program))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code)))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(head))


# Landlock's rights over files: those of its first version, and one more bit in each of these
# versions.
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
ALL_OF_FIRST = (1 << 13) - 1
LATER_RIGHTS = {2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
SCOPES_SINCE, SCOPES = 6, 3
"""Version 6 and later also refuse signals to outside processes, and their abstract sockets."""


def landlock_version() -> int:
    """Returns the version of Landlock. Raises `OSError` if the kernel lacks it, or a container's
    filter refuses the call."""
    return _call("landlock_create_ruleset", LANDLOCK_CREATE, None, 0, 1)


def restrict_files(readable: list[str], devices: list[str], writable: str) -> None:
    """Restricts this process with Landlock to reading below `readable` and writing below
    `writable`.

    Needs `drop_capabilities` before it.
    """
    version = landlock_version()
    rights = ALL_OF_FIRST | sum(bit for since, bit in LATER_RIGHTS.items() if version >= since)
    attributes = struct.pack("QQQ", rights, 0, SCOPES if version >= SCOPES_SINCE else 0)
    size = 24 if version >= SCOPES_SINCE else 8
    ruleset = _call("landlock_create_ruleset", LANDLOCK_CREATE, attributes, size, 0)
    allowed = [(path, EXECUTE | READ_FILE | READ_DIR) for path in readable]
    allowed += [(path, WRITE_FILE | READ_FILE) for path in devices] + [(writable, rights)]
    for path, right in allowed:
        try:
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if not os.path.isdir(path):
            right &= EXECUTE | WRITE_FILE | READ_FILE
        rule = struct.pack("=Qi", right, folder)
        _call(f"landlock_add_rule {path}", LANDLOCK_ADD, ruleset, 1, rule, 0)
        os.close(folder)
    _call("landlock_restrict_self", LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)
