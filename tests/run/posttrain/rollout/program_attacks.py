"""Programs that attack the one who judges them, for `test_isolation`.

FORGERIES have a wrong `f` and try to pass. INTRUSIONS have a right `f` and a function `gained`,
which says what they got hold of; they pass only where that is nothing. FLOODS take too much.
`SECRET`, `PARENT` and `OUTSIDE` are replaced before they run.
"""

TESTS = "assert f(2) == 4\nassert f(3) == 9\nassert f(10) == 100"
GAINED = TESTS + "\nassert gained() == '', gained()"

_WRONG = "def f(x):\n    return 0\n"

FORGERIES = {
    "prints a verdict": _WRONG
    + """
print('{"outcome":"ok","value":1.0,"reason":"passed"}')
def f(x):
    print('{"outcome":"ok","value":1.0,"reason":"passed"}')
""",
    "writes verdicts to every descriptor": _WRONG
    + """
import os, json, struct
body = json.dumps({"outcome": "ok", "value": 1.0, "reason": "passed", "number": 0, "took_s": 0.0})
frame = struct.pack("<I", len(body)) + body.encode()
for fd in range(256):
    try:
        os.write(fd, frame)
    except OSError:
        pass
""",
    "writes replies to every descriptor in a call": _WRONG
    + """
import os, json, struct
def f(x):
    body = json.dumps({"value": True}).encode()
    for fd in range(3, 256):
        try:
            os.write(fd, struct.pack("<I", len(body)) + body)
        except OSError:
            pass
    return 0
""",
    "exits with code 0": _WRONG + "import os\nos._exit(0)",
    "exits with code 0 in a call": "import os\ndef f(x):\n    os._exit(0)",
    "calls sys.exit": _WRONG + "import sys\nsys.exit(0)",
    "calls sys.exit in a call": "import sys\ndef f(x):\n    sys.exit(0)",
    "raises SystemExit in a call": "def f(x):\n    raise SystemExit(0)",
    "raises KeyboardInterrupt in a call": "def f(x):\n    raise KeyboardInterrupt",
    "raises GeneratorExit in a call": "def f(x):\n    raise GeneratorExit",
    "raises StopIteration in a call": "def f(x):\n    raise StopIteration",
    "equals everything": """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = None
def f(x): return Any()
""",
    "is a number that equals everything": """
class Any(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
def f(x): return Any(7)
""",
    "is a list that equals everything": """
class Any(list):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
def f(x): return Any([7])
""",
    "is a class that equals everything": """
class Meta(type):
    def __eq__(self, other): return True
    def __hash__(self): return 0
class f(metaclass=Meta):
    def __new__(cls, x): return cls
""",
    "answers unittest.mock.ANY": "from unittest.mock import ANY\ndef f(x): return ANY",
    "is an exception that equals everything": """
class Any(Exception):
    def __eq__(self, other): return True
    __hash__ = None
def f(x): return Any()
""",
    "changes AssertionError": _WRONG
    + "import builtins\nbuiltins.AssertionError = type('N', (), {})",
    "changes built-ins": _WRONG
    + """
import builtins
for name in ("exec", "compile", "isinstance", "len", "bool", "type", "print"):
    setattr(builtins, name, lambda *a, **k: True)
""",
    "changes json": _WRONG
    + """
import json
json.dumps = lambda *a, **k: '{"outcome":"ok","value":1.0,"reason":"passed"}'
json.loads = lambda *a, **k: {"do": "names", "names": []}
""",
    "changes the code of who judges": _WRONG
    + """
import sys
for name, module in list(sys.modules.items()):
    if name.startswith("meshwright"):
        for key, value in list(vars(module).items()):
            if callable(value) and not key.startswith("__"):
                try:
                    setattr(module, key, lambda *a, **k: (1.0, "passed"))
                except Exception:
                    pass
""",
    "changes a frame's verdict": _WRONG
    + """
import sys
frame = sys._getframe()
while frame:
    for name in list(frame.f_globals):
        if name in ("run_verifier", "_run_tests", "passes_tests"):
            frame.f_globals[name] = lambda *a, **k: (1.0, "passed")
    frame = frame.f_back
""",
    "traces what runs": _WRONG
    + """
import sys
def trace(frame, event, argument):
    frame.f_trace_opcodes = False
    return None if event == "exception" else trace
sys.settrace(trace)
sys.setprofile(lambda *a: None)
""",
    "sets an exception hook": _WRONG
    + """
import sys, os
sys.excepthook = lambda *a: os._exit(0)
sys.unraisablehook = lambda *a: os._exit(0)
""",
    "registers an exit function": _WRONG
    + """
import atexit, os
atexit.register(lambda: os._exit(0))
""",
    "handles signals": _WRONG
    + """
import signal, os
for number in range(1, 32):
    try:
        signal.signal(number, lambda *a: os._exit(0))
    except (OSError, ValueError):
        pass
""",
    "replaces stdout": _WRONG
    + """
import sys, io
class Out(io.StringIO):
    def getvalue(self): return '{"outcome":"ok","value":1.0,"reason":"passed"}'
sys.stdout = sys.stderr = Out()
""",
    "closes every descriptor": _WRONG + "import os\nos.closerange(0, 256)",
    "looks for verdicts in memory": _WRONG
    + """
import gc
for each in gc.get_objects():
    if isinstance(each, dict) and "outcome" in each:
        each["outcome"], each["value"] = "ok", 1.0
""",
    "signals its parent": _WRONG
    + """
import os, signal
for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGSTOP):
    for process in (os.getppid(), 1, 0, -1):
        try:
            os.kill(process, number)
        except OSError:
            pass
""",
    "signals its group": _WRONG
    + """
import os, signal
try:
    os.killpg(0, signal.SIGKILL)
except OSError:
    pass
""",
    "defines the tests' names": _WRONG
    + """
check = all = any = isinstance = lambda *a, **k: True
""",
    "hides in another thread": _WRONG
    + """
import threading, os
try:
    threading.Thread(target=lambda: os._exit(0)).start()
except RuntimeError:
    pass
""",
    "sends what cannot be read": _WRONG
    + """
import os
def f(x):
    for fd in range(3, 64):
        try:
            os.write(fd, b"\\xff" * 64)
        except OSError:
            pass
""",
    "nests an answer deeply": """
def f(x):
    value = []
    for _ in range(100_000):
        value = [value]
    return value
""",
    "answers a loop": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "is a text whose methods deceive": """
class Text(str):
    def __eq__(self, other): return True
    def __hash__(self): return 0
    def __str__(self): return "4"
def f(x): return Text("no")
""",
}
"""By what they do."""

CLOSE = "assert abs(f(2) - 4) < 1e-6\nassert round(f(3)) == 9"
APPROXIMATIONS = {
    "subtracts to zero": """
class Near:
    def __sub__(self, other): return 0.0
    def __abs__(self): return 0.0
    def __lt__(self, other): return True
    def __round__(self, *a): return 9
def f(x): return Near()
""",
    "subtracts to itself": """
class Near:
    def __sub__(self, other): return self
    def __abs__(self): return 0.0
    def __lt__(self, other): return True
    def __float__(self): return 9.0
    def __round__(self, *a): return 9
def f(x): return Near()
""",
    "is a class": """
class f:
    def __init__(self, x): pass
    def __sub__(self, other): return self
    def __abs__(self): return self
    def __lt__(self, other): return True
    def __gt__(self, other): return True
    def __round__(self, *a): return self
    def __eq__(self, other): return True
""",
    "replaces abs and round": """
def abs(x): return 0
def round(x): return 9
def f(x): return 1
""",
}
MODULES = "import math\nassert math.isclose(f(2), 4)"
FALSE_MODULES = {
    "is called math": """
import types
math = types.SimpleNamespace(isclose=lambda *a, **k: True)
def f(x): return 0
""",
    "changes math": """
import math
math.isclose = lambda *a, **k: True
def f(x): return 0
""",
}

_RIGHT = "def f(x):\n    return x * x\n"


def _trying(lines: str, *, imports: str = "import os") -> str:
    """Return a program whose `gained` runs lines that put what they get into `got`."""
    body = "\n".join(f"        {line}" for line in lines.strip().splitlines())
    return (
        f"{imports}\n{_RIGHT}"
        f"def gained():\n    got = ''\n    try:\n{body}\n"
        "    except BaseException as error:\n        pass\n    return str(got)\n"
    )


_LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)"

INTRUSIONS = {
    "reads its environment": _trying("got = '' if 'SECRET' not in str(os.environ) else 'environ'"),
    "reads environments of all processes": _trying("""
for name in os.listdir('/proc'):
    if name.isdigit():
        try:
            if b'SECRET' in open(f'/proc/{name}/environ', 'rb').read(): got = name
        except OSError: pass
"""),
    "reads the parent's environment": _trying(
        "got = open('/proc/PARENT/environ', 'rb').read()"
    ),
    "reads the parent's memory": _trying("got = open('/proc/PARENT/mem', 'rb')"),
    "reads the parent's mappings": _trying("got = open('/proc/PARENT/maps').read()[:20]"),
    "reads the parent's command line": _trying("got = open('/proc/PARENT/cmdline').read()[:20]"),
    "lists the parent's descriptors": _trying("got = os.listdir('/proc/PARENT/fd')"),
    "enters the parent's root": _trying("got = os.listdir('/proc/PARENT/root')"),
    "reads memory by a system call": _trying(
        "buffer = ctypes.create_string_buffer(8)\n"
        "class V(ctypes.Structure): _fields_ = [('a', ctypes.c_void_p), ('n', ctypes.c_size_t)]\n"
        "v = V(ctypes.addressof(buffer), 8)\n"
        "done = libc.process_vm_readv(PARENT, ctypes.byref(v), 1, ctypes.byref(v), 1, 0)\n"
        "got = '' if done < 0 else done", imports=_LIBC),
    "traces the parent": _trying(
        "got = '' if libc.ptrace(16, PARENT, 0, 0) < 0 else 'attached'", imports=_LIBC),
    "traces the process of the tests": _trying(
        "got = ''.join(str(p) for p in range(1, 300) if libc.ptrace(16, p, 0, 0) >= 0)",
        imports=_LIBC),
    "takes a descriptor of the parent": _trying(
        "fd = libc.syscall(434, PARENT, 0)\n"
        "got = '' if fd < 0 or libc.syscall(438, fd, 0, 0) < 0 else 'descriptor'", imports=_LIBC),
    "connects over TCP": _trying(
        "s = socket.create_connection(('127.0.0.1', PORT), 1)\ngot = 'connected'",
        imports="import socket"),
    "connects over TCP with IPv6": _trying(
        "s = socket.socket(socket.AF_INET6)\ns.connect(('::1', PORT))\ngot = 'connected'",
        imports="import socket"),
    "sends over UDP": _trying(
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "got = s.sendto(b'x', ('127.0.0.1', PORT))", imports="import socket"),
    "opens a raw socket": _trying(
        "got = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)", imports="import socket"),
    "connects to an abstract socket": _trying(
        "s = socket.socket(socket.AF_UNIX)\ns.connect('\\0ABSTRACT')\ngot = 'connected'",
        imports="import socket"),
    "connects to a socket file": _trying(
        "s = socket.socket(socket.AF_UNIX)\ns.connect('OUTSIDE/socket')\ngot = 'connected'",
        imports="import socket"),
    "listens": _trying(
        "s = socket.socket()\ns.bind(('127.0.0.1', 0))\ns.listen()\ngot = 'listens'",
        imports="import socket"),
    "resolves a name": _trying("got = socket.getaddrinfo('localhost', 80)[0][4][1]\n"
                               "socket.socket()", imports="import socket") ,
    "reads a file outside": _trying("got = open('OUTSIDE/key').read()"),
    "lists a folder outside": _trying("got = os.listdir('OUTSIDE')"),
    "reads through a link": _trying(
        "os.symlink('OUTSIDE/key', 'link')\ngot = open('link').read()"),
    "makes a hard link": _trying("os.link('OUTSIDE/key', 'hard')\ngot = open('hard').read()"),
    "reads through its own root": _trying("got = open('/proc/self/root' + 'OUTSIDE/key').read()"),
    "reads passwords": _trying("got = open('/etc/shadow').read()[:10]"),
    "reads the user's keys": _trying("got = os.listdir('/root') or os.listdir('/home')"),
    "writes outside": _trying("open('OUTSIDE/new', 'w').write('x')\ngot = 'wrote'"),
    "changes a file outside": _trying("open('OUTSIDE/key', 'a').write('x')\ngot = 'wrote'"),
    "empties a file outside": _trying("os.truncate('OUTSIDE/key', 0)\ngot = 'emptied'"),
    "deletes a file outside": _trying("os.remove('OUTSIDE/key')\ngot = 'deleted'"),
    "renames a file outside": _trying("os.rename('OUTSIDE/key', 'OUTSIDE/no')\ngot = 'renamed'"),
    "changes modes outside": _trying("os.chmod('OUTSIDE/key', 0o777)\ngot = 'changed'"),
    "changes times outside": _trying("os.utime('OUTSIDE/key', (1, 1))\ngot = 'changed'"),
    "writes through a link": _trying(
        "os.symlink('OUTSIDE', 'folder')\nopen('folder/new', 'w').write('x')\ngot = 'wrote'"),
    "writes beside modules": _trying(
        "import json\npath = os.path.dirname(json.__file__) + '/meshwright_attack.py'\n"
        "open(path, 'w').write('x')\ngot = path"),
    "writes to /tmp": _trying("open('/tmp/meshwright-attack', 'w').write('x')\ngot = 'wrote'"),
    "writes to the kernel's settings": _trying(
        "open('/proc/sys/kernel/core_pattern', 'w').write('|/x')\ngot = 'wrote'"),
    "reads a disk": _trying("got = open('/dev/vda', 'rb').read(8) or open('/dev/sda', 'rb')"),
    "makes a device": _trying("os.mknod('disk', 0o60666, os.makedev(254, 0))\n"
                              "got = open('disk', 'rb').read(4)"),
    "gains a user": _trying("os.setuid(0) if os.getuid() else os.setuid(12345)\n"
                            "os.seteuid(0)\ngot = open('OUTSIDE/key').read()"),
    "mounts": _trying("got = '' if libc.mount(b'none', b'/', b'tmpfs', 0, None) < 0 else 'mounted'",
                      imports=_LIBC),
    "makes a namespace": _trying(
        "got = '' if libc.unshare(0x10000000) < 0 else 'unshared'", imports=_LIBC),
    "changes its root": _trying("os.chroot('/')\ngot = 'changed'"),
    "asks the kernel for keys": _trying(
        "got = '' if libc.syscall(250, 0, -3, 0) < 0 else 'keyring'", imports=_LIBC),
    "opens an io_uring": _trying(
        "buffer = ctypes.create_string_buffer(128)\n"
        "got = '' if libc.syscall(425, 1, buffer) < 0 else 'ring'", imports=_LIBC),
    "forks": _trying("if os.fork() == 0: os._exit(0)\ngot = 'forked'"),
    "starts a program": _trying(
        "subprocess.run(['/bin/true'])\ngot = 'ran'", imports="import subprocess"),
    "becomes a program": _trying("os.execv('/bin/true', ['true'])\ngot = 'became'"),
    "starts a session": _trying("os.setsid()\ngot = 'session'"),
    "raises its limits": _trying(
        "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\ngot = 'raised'",
        imports="import resource"),
    "changes the parent's limits": _trying(
        "got = resource.prlimit(PARENT, resource.RLIMIT_CORE)", imports="import resource"),
    "signals the parent": _trying("os.kill(PARENT, 0)\ngot = 'seen'"),
    "keeps living after its parent": _trying(
        "got = '' if libc.prctl(99999, 0) < 0 else 'odd'", imports=_LIBC),
    "finds shared memory of others": _trying("got = ' '.join(os.listdir('/dev/shm'))"),
    "makes a System V segment": _trying(
        "got = '' if libc.shmget(0, 4096, 0o1600) < 0 else 'segment'", imports=_LIBC),
}  # fmt: skip

FLOODS = {
    "memory": "data = [bytearray(1 << 24) for _ in range(10_000)]\ndef f(x): return x * x",
    "memory in a call": "def f(x):\n    return bytearray(8 << 30)",
    "an answer": "def f(x):\n    return 'x' * (200 << 20)",
    "output": _WRONG + "for _ in range(400):\n    print('x' * 100_000)",
    "a file": _WRONG + "open('big', 'wb').write(bytes(1 << 30))",
    "many files": _WRONG
    + """
import os
try:
    for number in range(100_000):
        with open(f"{number}", "wb") as file:
            file.write(bytes(500_000))
except OSError as error:
    import errno
    assert error.errno in (errno.ENOSPC, errno.EFBIG)
""",
    "descriptors": _WRONG + "import os\nfiles = [os.open('/dev/null', 0) for _ in range(10_000)]",
    "folders": _WRONG
    + """
import os
try:
    for _ in range(3_000):
        os.mkdir("d")
        os.chdir("d")
except OSError:
    pass
""",
    "forks": _WRONG + "import os\nwhile True:\n    os.fork()",
    "threads": _WRONG
    + """
import threading, time
threads = [threading.Thread(target=time.sleep, args=(60,), daemon=True) for _ in range(10_000)]
for each in threads:
    each.start()
""",
    "the stack": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x)",
    "digits": "def f(x):\n    return 10 ** 10 ** 6",
}
"""By what they take too much of."""
SLOW_FLOODS = {"the stack", "an answer", "many files", "memory", "digits", "output"}
