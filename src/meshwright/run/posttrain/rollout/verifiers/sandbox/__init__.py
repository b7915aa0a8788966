"""Isolation of processes that run programs nobody has read, as far as the kernel allows it.

linux_calls      system calls that the standard library does not have
namespaces       user, mount, PID, network, IPC and UTS namespaces with mounts of their own
landlock         rules for files, TCP, signals and abstract sockets
seccomp_filter   system calls that are refused
privileges       capabilities, user, no_new_privs, and what the kernel does on a lack of memory
resource_limits  rlimits
process_tree     ends everything that a process started
sandbox_config   what a process may do, and `SandboxStatus`: which layers hold it to that
confinement      applies all layers to the calling process

These modules import the standard library alone: they are loaded before anything is judged.
"""
