"""`HostOffload`: tensors that leave a device for host memory and come back, bit by bit the same.

    states = Offload(device, tensors)
    states.out()      they lie in host memory, where they are read and written as before
    states.back()     they lie on the device again, at other addresses

A tensor stays the object that it is, so whoever holds it finds its numbers wherever they lie: a
checkpoint can be written and read at any time. Views of it, and addresses that were looked up, do
not follow. A processor is treated as any device: what leaves it lies in other memory, and its own
is free. For a GPU host memory is pinned, and kept for the next time, as it takes long to make.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

_SLAB_BYTES = 2**30
"""Host memory is taken in pieces of so much, or of one tensor that is larger: torch rounds each up
to a power of two where it is pinned."""
_ALIGNED_BYTES = 64


class HostOffload:
    """Tensors of one device that are there, or away."""

    def __init__(self, device: torch.device, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """Move what `tensors` returns when it is asked, the same ones each time."""
        self._device, self._tensors = device, tensors
        self._slabs: list[Tensor] = []
        self.is_offloaded = False

    @property
    def device_bytes(self) -> int:
        """Bytes of them that lie on the device, by where each of them is."""
        host = {each.untyped_storage().data_ptr() for each in self._slabs}
        return sum(
            each.nbytes for each in self._tensors() if each.untyped_storage().data_ptr() not in host
        )

    def offload(self) -> None:
        """Move all to host memory, and give the device's back."""
        if self.is_offloaded:
            return
        tensors = list(self._tensors())
        rooms = self._rooms(tensors)
        for tensor, room in zip(tensors, rooms, strict=True):
            room.copy_(tensor.detach(), non_blocking=True)
        self._settle()
        for tensor, room in zip(tensors, rooms, strict=True):
            tensor.data = room
        self.is_offloaded = True
        if self._device.type == "cuda":
            # Engines of other processes can use it as well.
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Move all to the device again."""
        if not self.is_offloaded:
            return
        for tensor in self._tensors():
            tensor.data = tensor.detach().to(self._device, non_blocking=True, copy=True)
        self._settle()
        self.is_offloaded = False
        if self._device.type != "cuda":
            self._slabs = []

    def _rooms(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return host memory for tensors, each in the order in which it lies on the device."""
        sizes = [-(-each.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for each in tensors]
        places, slabs = _packed(sizes)
        if [each.numel() for each in self._slabs] != slabs:
            pinned = self._device.type == "cuda"
            self._slabs = []  # before others are made, so that both need not fit
            self._slabs = [
                torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in slabs
            ]
        return [
            self._slabs[slab][at : at + tensor.nbytes]
            .view(tensor.dtype)
            .as_strided(tensor.shape, tensor.stride())
            for tensor, (slab, at) in zip(tensors, places, strict=True)
        ]

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _packed(sizes: Iterable[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the slab of each of so many bytes and where it begins there, and the slabs' sizes."""
    places: list[tuple[int, int]] = []
    slabs: list[int] = []
    for size in sizes:
        if not slabs or slabs[-1] + size > max(_SLAB_BYTES, size):
            slabs.append(0)
        places.append((len(slabs) - 1, slabs[-1]))
        slabs[-1] += size
    return places, slabs
