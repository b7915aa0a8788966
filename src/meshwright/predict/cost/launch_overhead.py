"""What launching kernels costs: the host's queue against the GPU's work.

The host launches kernels one after another while the GPU runs them. As long as the GPU is
slower, launching is free; where many kernels are short, the host sets the pace. A CUDA graph
launches all of them at once. Which kernels a layer has is the caller's matter.
"""

from meshwright.predict.cost.device_costs import DeviceCosts


def eager_s(device: DeviceCosts, kernels: float, gpu_s: float) -> float:
    """Return the time of so many kernels launched one by one, whose work takes `gpu_s`."""
    return max(gpu_s, kernels * device.launch.host_s)


def cuda_graph_s(device: DeviceCosts, kernels: float, gpu_s: float) -> float:
    """Return the time of the same kernels in one CUDA graph: the work, or one launch."""
    return max(gpu_s, device.launch.graph_s) if kernels else 0.0


def exposed_launch_s(device: DeviceCosts, kernels: float, gpu_s: float) -> float:
    """Return how long the GPU waits for the host while so many kernels are launched one by one."""
    return eager_s(device, kernels, gpu_s) - gpu_s
