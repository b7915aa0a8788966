"""Collectives as files.

write_msccl_xml, read_msccl_xml    MSCCL's XML, which RCCL and msccl-executor-nccl run
write_mscclpp_json                 an execution plan of MSCCL++
write_plain, read_plain            a plain file of our own, which states every field of the value
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.policy.collective.formats.msccl_xml import read_msccl_xml, write_msccl_xml
    from meshwright.policy.collective.formats.mscclpp_json import write_mscclpp_json
    from meshwright.policy.collective.formats.plain import read_plain, write_plain

_HOMES = {
    "read_msccl_xml": "meshwright.policy.collective.formats.msccl_xml",
    "read_plain": "meshwright.policy.collective.formats.plain",
    "write_msccl_xml": "meshwright.policy.collective.formats.msccl_xml",
    "write_mscclpp_json": "meshwright.policy.collective.formats.mscclpp_json",
    "write_plain": "meshwright.policy.collective.formats.plain",
}

__all__ = [
    "read_msccl_xml",
    "read_plain",
    "write_msccl_xml",
    "write_mscclpp_json",
    "write_plain",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
