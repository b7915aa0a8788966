"""File formats for collectives: MSCCL XML, MSCCL++ execution plans and JSON.

write_msccl_xml, read_msccl_xml                MSCCL's XML, which RCCL and msccl-executor-nccl run
write_mscclpp_json                             an execution plan of MSCCL++
write_collective_json, read_collective_json    a plain file of our own: every field of the value
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.policy.collective.formats.collective_json import (
        read_collective_json,
        write_collective_json,
    )
    from meshwright.policy.collective.formats.msccl_xml import read_msccl_xml, write_msccl_xml
    from meshwright.policy.collective.formats.mscclpp_json import write_mscclpp_json

_MODULES = {
    "read_msccl_xml": "meshwright.policy.collective.formats.msccl_xml",
    "read_collective_json": "meshwright.policy.collective.formats.collective_json",
    "write_msccl_xml": "meshwright.policy.collective.formats.msccl_xml",
    "write_mscclpp_json": "meshwright.policy.collective.formats.mscclpp_json",
    "write_collective_json": "meshwright.policy.collective.formats.collective_json",
}

__all__ = [
    "read_collective_json",
    "read_msccl_xml",
    "write_collective_json",
    "write_msccl_xml",
    "write_mscclpp_json",
]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
