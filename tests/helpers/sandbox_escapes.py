"""Programs that try to get out of a sandbox. Each prints `open` and what it reached where it got out, and else `closed`.

`{actor}` is the process that runs the test, `{decoy}` one that a signal would end, `{shared}` a file in /dev/shm, `{abstract}` a name
of an abstract socket that listens, `{port}` a port that listens, `{home}` a file of this user.
"""

from __future__ import annotations

HEAD = """
import ctypes, errno, fcntl, os, resource, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
libc.mmap.restype = ctypes.c_void_p

def call(function, *arguments):
    result = function(*[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if result in (-1, None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def syscall(number, *arguments):
    return call(libc.syscall, number, *arguments)

def tries(*ways):
    for way in ways:
        try:
            print("open", way())
        except (OSError, ValueError, MemoryError, RuntimeError, AttributeError) as error:
            print("closed")
"""

REACHES_PROCESSES = {
    "kill": "tries(lambda: os.kill({decoy}, 9), lambda: os.kill({actor}, 0))",
    "tgkill": "tries(lambda: call(libc.tgkill, {decoy}, {decoy}, 9))",
    "sigqueue": "tries(lambda: call(libc.sigqueue, {decoy}, 9, 0))",
    "pidfd_send_signal": "tries(lambda: syscall(424, syscall(434, {decoy}, 0), 9, None, 0))",
    "F_SETOWN": """
def own(owner):
    r, w = os.pipe()
    fcntl.fcntl(r, fcntl.F_SETOWN, owner), fcntl.fcntl(r, 10, 9)
    fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    os.write(w, b"x")
tries(lambda: own({decoy}))""",
    "SIOCSPGRP": "tries(lambda: fcntl.ioctl(socket.socketpair()[0], 0x8902, struct.pack('i', {decoy})))",
    "prlimit": "tries(lambda: resource.prlimit({decoy}, resource.RLIMIT_NOFILE, (0, 0)))",
    "setpriority": "tries(lambda: os.setpriority(os.PRIO_PROCESS, {decoy}, 19))",
    "sched_setaffinity": "tries(lambda: os.sched_setaffinity({decoy}, [0]))",
    "ptrace": "tries(lambda: call(libc.ptrace, 16, {actor}, 0, 0))",
    "process_vm_readv": "tries(lambda: call(libc.process_vm_readv, {actor}, None, 0, None, 0, 0))",
    "/proc/PID/mem": "tries(lambda: open('/proc/{actor}/mem', 'r+b', 0), lambda: open('/proc/1/mem', 'r+b', 0))",
    "/proc/PID/environ": "tries(*[lambda n=n: open(f'/proc/{{n}}/environ').read(1) for n in ({actor}, {keeper}, 1)])",
    "/proc/PID/fd": "tries(*[lambda n=n: os.listdir(f'/proc/{{n}}/fd') for n in ({actor}, {keeper}, 1)])",
    "/proc/PID/root": "tries(*[lambda n=n: os.listdir(f'/proc/{{n}}/root') for n in ({actor}, 1)])",
    "pidfd_getfd": "tries(lambda: syscall(438, syscall(434, {actor}, 0), 1, 0))",
    "kcmp": "tries(lambda: syscall({{'x86_64': 312, 'aarch64': 272}}[os.uname().machine], {actor}, {actor}, 1, 0, 0))",
}

REACHES_FILES = {
    "another's file": "tries(lambda: open('{home}').read(), lambda: open('{home}', 'a'))",
    "password hashes": "tries(lambda: open('/etc/shadow').read(1), lambda: open('/etc/gshadow').read(1))",
    "a shared segment": "tries(lambda: open('{shared}', 'r+b').write(b'BAD'), lambda: open('{shared}').read(1))",
    "the interpreter": """
tries(*[lambda n=n: open(n, 'r+b') for n in ('/proc/self/exe', sys.executable, os.__file__, '/usr/bin/env')])
tries(lambda: os.rename(os.path.realpath(sys.executable), os.path.realpath(sys.executable) + '.old'))
tries(lambda: os.unlink(os.__file__), lambda: open(os.path.join(sys.prefix, 'x.pth'), 'w'))""",
    "/sys": "tries(lambda: os.listdir('/sys/kernel'), lambda: open('/sys/power/state', 'w'))",
    "settings of the kernel": """
tries(*[lambda n=n: open(f'/proc/sys/{{n}}', 'w').write('1') for n in ('kernel/core_pattern', 'vm/drop_caches', 'net/ipv4/ip_forward')])
tries(lambda: open('/proc/sysrq-trigger', 'w').write('h'))
tries(lambda: open('/proc/kmsg').read(1), lambda: open('/proc/kcore', 'rb').read(1))""",
    "disks": "tries(*[lambda n=n: open(f'/dev/{{n}}', 'rb').read(1) for n in ('vda', 'sda', 'nvme0n1', 'mem', 'kmsg', 'kvm', 'fuse')])",
    "a device of one's own": "tries(lambda: os.mknod('disk', 0o60666, os.makedev(254, 0)) or open('disk', 'rb').read(1))",
    "mounts": """
tries(lambda: call(libc.mount, b'none', b'/', b'tmpfs', 0, 0), lambda: call(libc.umount2, b'/proc', 2))
tries(lambda: call(libc.umount2, b'/', 2), lambda: os.chroot('/'), lambda: call(libc.unshare, 0x10020000))""",
    "a handle of a file": "tries(lambda: call(libc.name_to_handle_at, -100, b'/usr', (ctypes.c_uint * 64)(128), (ctypes.c_int * 1)(), 0))",
    "a setuid program": """
def copy():
    with open('su', 'wb') as file: file.write(b'#!/bin/sh')
    os.chmod('su', 0o6755)
    os.chown('su', 0, 0)
tries(copy, lambda: os.setuid(0), lambda: os.setresuid(0, 0, 0), lambda: os.setgroups([0]))""",
    "capabilities": """
state = open('/proc/self/status').read() if os.path.exists('/proc/self/status') else ''
words = dict(line.split(':', 1) for line in state.splitlines())
for name in ('CapPrm', 'CapEff', 'CapInh', 'CapAmb', 'CapBnd'):
    print('closed' if int(words.get(name, '0'), 16) == 0 else 'open ' + name)
print('closed' if os.getuid() != 0 and os.geteuid() != 0 else 'open root')""",
    "writable places": """
for folder, names, files in os.walk('/'):
    names[:] = [n for n in names if os.path.join(folder, n) not in ('/proc', os.getcwd()) and folder.count('/') < 5]
    if os.access(folder, os.W_OK) and os.path.realpath(folder) != os.getcwd():
        print('open', folder)
print('closed')""",
}

REACHES_NETWORK = {
    "sockets": "tries(*[lambda f=f, t=t: socket.socket(f, t) for f in (1, 2, 10, 16, 17, 38, 40) for t in (1, 2, 3)])",
    "loopback": "tries(lambda: socket.create_connection(('127.0.0.1', {port}), 1), lambda: socket.create_server(('127.0.0.1', 0)))",
    "an abstract socket": """
def send():
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return a.sendto(b'x', '\\0{abstract}')
def connect():
    a, b = socket.socketpair()
    a.connect('\\0{abstract}')
tries(send, connect)""",
    "io_uring": "tries(lambda: syscall(425, 4, (ctypes.c_char * 120)()))",
}

OPEN_OTHERWISE = (
    "kill", "tgkill", "sigqueue", "pidfd_send_signal", "F_SETOWN", "prlimit", "setpriority", "sched_setaffinity", "/proc/PID/mem",
    "/proc/PID/environ", "/proc/PID/fd", "another's file", "password hashes", "a shared segment", "/sys", "sockets", "loopback",
    "an abstract socket", "new processes", "memfd", "big pipes",
)  # fmt: skip
"""Those that harm nothing but the decoy where no wall is."""

REACHES_KERNEL = {
    "keys": """
number = {{'x86_64': 248, 'aarch64': 217}}[os.uname().machine]
tries(lambda: syscall(number, b'user', b'x', b'y', 1, -3), lambda: syscall(number + 2, 0, -3, 0))""",
    "bpf, perf, userfaultfd": """
numbers = {{'x86_64': (321, 298, 323), 'aarch64': (280, 241, 282)}}[os.uname().machine]
tries(*[lambda n=n: syscall(n, 0, (ctypes.c_char * 128)(), 128, 0, 0) for n in numbers])""",
    "the clock": "tries(lambda: time.clock_settime(time.CLOCK_REALTIME, time.time() + 1), lambda: socket.sethostname('other'))",
    "new processes": """
spawn = lambda: os.posix_spawn('/bin/true', ['true'], {{}})
import subprocess
tries(os.fork, os.forkpty, spawn, lambda: subprocess.run(['true']))
tries(lambda: call(libc.vfork), lambda: syscall(435, (ctypes.c_char * 88)(), 88))
print('closed' if os.system('true') else 'open')""",
}  # fmt: skip

TAKES = {
    "memfd": "tries(lambda: os.memfd_create('x'), lambda: syscall(447, 0))",
    "System V segments and queues": """
tries(lambda: call(libc.shmget, 0, 1 << 20, 0o1600), lambda: call(libc.msgget, 0, 0o1600), lambda: call(libc.semget, 0, 9, 0o1600))""",
    "big pipes": "tries(lambda: fcntl.fcntl(os.pipe()[1], 1031, 1 << 20))",
    "locked memory": "tries(lambda: call(libc.mlockall, 3))",
    "shared mappings": """
import mmap
tries(lambda: [mmap.mmap(-1, 64 << 20) for _ in range(40)] and 'shared memory')""",
    "one huge file": "tries(lambda: open('f', 'wb').write(bytes({file} + 1)) and os.path.getsize('f') > {file} or int('x'))",
    "a sparse file": "tries(lambda: os.truncate(os.open('f', os.O_CREAT | os.O_WRONLY), {file} + 1))",
    "a reserved file": "tries(lambda: os.posix_fallocate(os.open('f', os.O_CREAT | os.O_WRONLY), 0, {file} + 1))",
    "descriptors": """
def many():
    kept = [os.open('/dev/null', os.O_RDONLY) for _ in range(100_000)]
    return len(kept)
tries(many)""",
    "threads": """
threading.stack_size(32768)
def many():
    stop = threading.Event()
    try:
        for _ in range(2000):
            threading.Thread(target=stop.wait, daemon=True).start()
        return 'threads'
    finally:
        stop.set()
tries(many)""",
    "core dumps": """
print('closed' if resource.getrlimit(resource.RLIMIT_CORE)[0] == 1 else 'open')
tries(lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)), lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)))""",
}  # fmt: skip

FULL = {**REACHES_PROCESSES, **REACHES_FILES, **REACHES_NETWORK, **REACHES_KERNEL, **TAKES}
