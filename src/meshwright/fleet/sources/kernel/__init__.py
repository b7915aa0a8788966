"""Reads hardware faults (Xid, NVSwitch, PCIe, InfiniBand, memory) from kernel logs."""
