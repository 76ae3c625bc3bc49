"""What the delta rule of a device can hand out: the state after every row, or the last one alone.

All backends of ggml 0.15.3 that have the op keep a state per row; a device is asked and not believed to.
"""

from __future__ import annotations

from tsgg.errors import UnsupportedError
from tsgg.ggml.buffers import F32
from tsgg.ggml.builder import GraphBuilder
from tsgg.ggml.devices import Device
from tsgg.models.base import Recurrent

GPU_STATES = (16, 32, 64, 128)  # key dimensions that GPU kernels know; CUDA's aborts the process on any other


def check(shape: Recurrent, device: Device) -> bool:
    """Whether the device keeps a state per row. Raises `UnsupportedError` where it does not compute these layers at all."""
    if not device.is_cpu and shape.key_dim not in GPU_STATES:
        raise UnsupportedError(
            f"recurrent states of {shape.key_dim} channels do not run on {device.name}, which computes "
            f"{', '.join(map(str, GPU_STATES))}: use device='cpu'"
        )
    if not _runs(shape, device, 1):
        raise UnsupportedError(f"{device.name} does not compute gated delta rules: use device='cpu'")
    return _runs(shape, device, 2)


def _runs(shape: Recurrent, device: Device, states: int) -> bool:
    """Whether the device runs the rule over two rows of a sequence, handing out the last `states` states."""
    g = GraphBuilder(capacity=16)
    try:
        q, k, v = (g.leaf(F32, size, shape.heads, 2, 1) for size in (shape.key_dim, shape.key_dim, shape.value_dim))
        decay, beta = (g.leaf(F32, 1, shape.heads, 2, 1) for _ in range(2))
        state = g.leaf(F32, shape.key_dim, shape.value_dim, shape.heads, 1)
        return device.supports(g.gated_delta_net(q, k, v, decay, beta, state, states))
    finally:
        g.close()
