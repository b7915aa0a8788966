"""What one wire of each kind carries, per direction: for readers that find only counts.

Physical rates; how much of them a library reaches is a calibration. Only the rates between CPU
sockets are NCCL's own estimates, since no file states them.
"""

# GB/s per NVLink by compute capability: NVIDIA's figures per link (P100 20, V100 and A100 25,
# GA10x 14.06, H100 25, Blackwell 50).
_NVLINK = {60: 20e9, 70: 25e9, 80: 25e9, 86: 14.0625e9, 90: 25e9, 100: 50e9}

# xGMI per link by AMD architecture: stas00/ml-engineering, network (MI250X 50, MI300X 64,
# MI355X 76.5); recalled for MI50 and MI100: 46.
_XGMI = {"906": 46e9, "908": 46e9, "90a": 50e9, "910": 50e9, "940": 64e9, "941": 64e9}
_XGMI |= {"942": 64e9, "950": 76.5e9}

# Usable bytes per lane and second: the line rate less its encoding (8b/10b, 128b/130b, FLIT).
_PCIE_LANE = {
    2.5: 2.5e9 / 8 * 8 / 10,
    5.0: 5e9 / 8 * 8 / 10,
    8.0: 8e9 / 8 * 128 / 130,
    16.0: 16e9 / 8 * 128 / 130,
    32.0: 32e9 / 8 * 128 / 130,
    64.0: 64e9 / 8 * 242 / 256,
}

MAX_NVLINKS = 18
"""The most NVLinks any GPU has had (H100, B200)."""


def nvlink_bytes_per_s(sm: int) -> float | None:
    """Return what one NVLink carries on a GPU of compute capability `sm` (90 for sm_90)."""
    known = [version for version in _NVLINK if version <= sm]
    return _NVLINK[max(known)] if known else None


def xgmi_bytes_per_s(arch: str) -> float | None:
    """Return what one xGMI link carries on an AMD GPU (942 for gfx942)."""
    return _XGMI.get(arch.lower().removeprefix("gfx"))


def pcie_bytes_per_s(transfers_per_s: float, lanes: int) -> float | None:
    """Return what a PCIe link carries, from its line rate in GT/s and its width."""
    lane = _PCIE_LANE.get(transfers_per_s)
    return None if lane is None else lane * lanes


def socket_bytes_per_s(arch: str, vendor: str, model: int) -> float:
    """Return what NCCL 2.30.7 assumes to cross between two CPUs of a host."""
    if arch in ("arm64", "aarch64"):
        return 6e9
    if arch == "ppc64":
        return 32e9
    if "AMD" in vendor:
        return 16e9
    if "Intel" in vendor:
        # Emerald Rapids, Sapphire Rapids, Skylake; Broadwell and before.
        return next((rate for least, rate in _INTEL if model >= least), 6e9)
    return 6e9


_INTEL = ((207, 40e9), (143, 22e9), (85, 10e9))
