"""What lines of the kernel tell of faults: Xids, NVSwitch, PCI Express, InfiniBand, memory."""

import re
from typing import Final, NamedTuple

_XID: Final = re.compile(
    r"NVRM: (?:\S+ )?Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]+)(?: GPU-I:\w+)?\): "
    r"(?P<code>\d{1,9})(?P<text>.*)"
)
_SXID: Final = re.compile(
    r"nvidia-nvswitch\d*:? .*?SXid \(PCI:(?P<pci>[0-9a-fA-F:.]+)\): (?P<code>\d{1,9})(?P<text>.*)"
    r"|NVSwitch (?P<how>(?:non-)?fatal) error (?P<number>\d{1,9}) (?P<rest>.*)"
)
_DEVICE: Final = re.compile(
    r"NVRM: GPU at PCI:(?P<pci>[0-9a-fA-F:.]+): (?P<uuid>GPU-[0-9a-fA-F-]+)"
)
_WHERE: Final = re.compile(r"pci bus id (?P<pci>[0-9a-fA-F:.]+)")
_BOOT: Final = re.compile(r"Linux version \d+\.\d+")
_FATAL: Final = re.compile(r"(?<![-\w])fatal\b", re.IGNORECASE)


class MessagePattern(NamedTuple):
    """A message that tells of a fault."""

    kind: str
    pattern: re.Pattern[str]


def _form(kind: str, pattern: str) -> MessagePattern:
    return MessagePattern(kind, re.compile(pattern, re.IGNORECASE))


_FORMS: Final = (
    _form("pcie_fatal", r"(?:AER|PCIe Bus Error): .*uncorrect\w+ \(fatal\)"
          r"|AER: device recovery failed|pciehp.*link down"),
    _form("pcie", r"PCIe Bus Error: severity=|AER: .*corrected"),
    _form("infiniband", r"mlx[45]_(?:core|ib)\b.*(?:link down|health compromised|cmd.* timeout|"
          r"health poll failed|internal error|firmware .*fatal|device is dead|"
          r"port module event.*(?:error|unplugged))|infiniband \w+: .*port.*(?:down|error)"
          r"|ib\d+: link down"),
    _form("host_memory", r"EDAC .*\bUE\b|Memory failure: 0x\w+"
          r"|\[Hardware Error\]:.*(?:fatal|uncorrected)"),
    _form("nvlink", r"NVRM: .*NVLink.*(?:fatal|failed|error)"
          r"|nvidia-nvswitch\d*: .*link.*(?:failed|error)"),
    _form("segfault", r"segfault at \w+ ip .* in lib(?:nccl|cuda|torch)"),
    _form("peermem", r"nvidia-peermem .*ERROR"),
    _form("oom", r"^(?:Out of memory: Kill|Memory cgroup out of memory: Kill)"),
)  # fmt: skip


class KernelFault(NamedTuple):
    """A fault that a line tells of."""

    kind: str
    code: int | None
    pci_address: str
    """Address of the device, `0000:9b:00`; empty: of the node."""
    text: str


def parse_device(text: str) -> tuple[str, str] | None:
    """Return address and name of a GPU, where the line says which is which."""
    found = _DEVICE.search(text)
    return (normalize_pci_address(found["pci"]), found["uuid"]) if found else None


def parse_fault(text: str) -> KernelFault | None:
    """Return the fault that a line tells of; None: none that is known."""
    found = _XID.search(text)
    if found:
        told = found["text"].strip(" ,")
        return KernelFault("xid", int(found["code"]), normalize_pci_address(found["pci"]), told)
    found = _SXID.search(text)
    if found:
        if found["code"]:
            told = found["text"].strip(" ,")
            return KernelFault(
                "nvswitch", int(found["code"]), normalize_pci_address(found["pci"]), _graded(told)
            )
        where = _WHERE.search(found["rest"])
        told = f"{found['how']}, {found['rest']}"
        return KernelFault(
            "nvswitch",
            int(found["number"]),
            normalize_pci_address(where["pci"]) if where else "",
            told,
        )
    if _BOOT.search(text):
        return KernelFault("boot", None, "", "the node started")
    for form in _FORMS:
        if form.pattern.search(text):
            return KernelFault(form.kind, None, "", text.strip())
    return None


def is_fatal(text: str) -> bool:
    """Say whether a message calls its error fatal; `non-fatal` and `Nonfatal` do not."""
    return bool(_FATAL.search(text))


def _graded(text: str) -> str:
    """Say first how grave it is, whatever way it is spelled."""
    if is_fatal(text) or not re.search(r"non-?fatal", text, re.IGNORECASE):
        return text
    return "non-fatal, " + re.sub(r"(?i)^\W*non-?fatal\W*", "", text)


def normalize_pci_address(text: str) -> str:
    """Return a PCI address without its function, with four digits of domain, in small letters."""
    parts = text.lower().partition(".")[0].split(":")
    if len(parts) == 2:
        parts = ["0000", *parts]
    return ":".join([parts[0][-4:].rjust(4, "0"), *parts[1:3]])
