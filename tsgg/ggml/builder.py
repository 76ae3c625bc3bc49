"""Graph builder: ggml's ops under ggml's names, on one metadata context.

A method returns the result tensor, nothing is computed. Shapes in comments are ggml's `ne`, fastest first. Order matters
only for ops with side effects (`set_rows`, `cpy`): `expand` them where they are to run, before anything that reads the
memory they write.
"""

from __future__ import annotations

import weakref
from typing import Any

from tsgg.errors import OutOfMemoryError, UsageError
from tsgg.ggml.buffers import Tensor
from tsgg.ggml.library import ffi, lib


class GraphBuilder:
    """Builds one graph of at most `capacity` nodes. Hand it to `tsgg.ggml.graph.Graph`, which allocates and replays it."""

    def __init__(self, capacity: int = 4096) -> None:
        size = (2 * capacity) * lib.ggml_tensor_overhead() + lib.ggml_graph_overhead_custom(capacity, False)
        params = {"mem_size": size, "mem_buffer": ffi.NULL, "no_alloc": True}
        self.ctx = lib.ggml_init(ffi.new("struct ggml_init_params *", params)[0])
        if self.ctx == ffi.NULL:
            raise OutOfMemoryError(f"no memory for a graph of {capacity} nodes")
        self.graph = lib.ggml_new_graph_custom(self.ctx, capacity, False)
        self.inputs: dict[str, Tensor] = {}
        self._free = weakref.finalize(self, lib.ggml_free, self.ctx)

    def close(self) -> None:
        self._free()

    # -- inputs, outputs, order ------------------------------------------------------------------------------------

    def input(self, name: str, type: int, *shape: int) -> Tensor:
        """A tensor that the caller fills before every replay. Asked for again by the same name, it is the same one.

        Flagged INPUT and OUTPUT: an input alone may be overwritten by a later in-place op.
        """
        if name not in self.inputs:
            tensor = lib.ggml_new_tensor(self.ctx, type, len(shape), list(shape))
            lib.ggml_set_name(tensor, name.encode())
            lib.ggml_set_input(tensor)
            lib.ggml_set_output(tensor)
            self.inputs[name] = tensor
        return self.inputs[name]

    def leaf(self, type: int, *shape: int) -> Tensor:
        """A tensor that ops of this graph write into (`cpy` to a view of it) before others read it: no input."""
        return lib.ggml_new_tensor(self.ctx, type, len(shape), list(shape))

    def output(self, tensor: Tensor) -> Tensor:
        """Marks a result that is read after the replay, and schedules it."""
        lib.ggml_set_output(tensor)
        return self.expand(tensor)

    def expand(self, tensor: Tensor) -> Tensor:
        """Schedules a tensor and all it needs after everything scheduled so far."""
        lib.ggml_build_forward_expand(self.graph, tensor)
        return tensor

    # -- arithmetic ------------------------------------------------------------------------------------------------

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return lib.ggml_add(self.ctx, a, b)

    def sub(self, a: Tensor, b: Tensor) -> Tensor:
        return lib.ggml_sub(self.ctx, a, b)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        return lib.ggml_mul(self.ctx, a, b)

    def div(self, a: Tensor, b: Tensor) -> Tensor:
        return lib.ggml_div(self.ctx, a, b)

    def scale(self, a: Tensor, factor: float) -> Tensor:
        return lib.ggml_scale(self.ctx, a, factor)

    def clamp(self, a: Tensor, low: float, high: float) -> Tensor:
        """In place in this ggml: `a` itself is overwritten, so give it a tensor nobody else reads."""
        return lib.ggml_clamp(self.ctx, a, low, high)

    def tanh(self, a: Tensor) -> Tensor:
        return lib.ggml_tanh(self.ctx, a)

    def silu(self, a: Tensor) -> Tensor:
        return lib.ggml_silu(self.ctx, a)

    def gelu(self, a: Tensor) -> Tensor:
        return lib.ggml_gelu(self.ctx, a)

    def sigmoid(self, a: Tensor) -> Tensor:
        return lib.ggml_sigmoid(self.ctx, a)

    def softplus(self, a: Tensor) -> Tensor:
        return lib.ggml_softplus(self.ctx, a)

    def exp(self, a: Tensor) -> Tensor:
        return lib.ggml_exp(self.ctx, a)

    def swiglu_split(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up"""
        return lib.ggml_swiglu_split(self.ctx, gate, up)

    def swiglu(self, a: Tensor) -> Tensor:
        """silu(first half of axis 0) * second half"""
        return lib.ggml_swiglu(self.ctx, a)

    def geglu_split(self, gate: Tensor, up: Tensor) -> Tensor:
        """gelu(gate) * up, the tanh approximation of gelu"""
        return lib.ggml_geglu_split(self.ctx, gate, up)

    def geglu(self, a: Tensor) -> Tensor:
        """gelu(first half of axis 0) * second half"""
        return lib.ggml_geglu(self.ctx, a)

    def sum_rows(self, a: Tensor) -> Tensor:
        """{n, ...} -> {1, ...}"""
        return lib.ggml_sum_rows(self.ctx, a)

    def rms_norm(self, a: Tensor, eps: float) -> Tensor:
        return lib.ggml_rms_norm(self.ctx, a, eps)

    def l2_norm(self, a: Tensor, eps: float) -> Tensor:
        return lib.ggml_l2_norm(self.ctx, a, eps)

    # -- matrices --------------------------------------------------------------------------------------------------

    def mul_mat(self, a: Tensor, b: Tensor) -> Tensor:
        """{k, m, x, y} and {k, n, x*i, y*j} -> {m, n, x*i, y*j}, F32"""
        return lib.ggml_mul_mat(self.ctx, a, b)

    def mul_mat_f32(self, a: Tensor, b: Tensor) -> Tensor:
        """`mul_mat` with F32 accumulation where a device would use F16 (attention scores overflow it)."""
        result = lib.ggml_mul_mat(self.ctx, a, b)
        lib.ggml_mul_mat_set_prec(result, lib.GGML_PREC_F32)
        return result

    def mul_tiles(self, tiles: Tensor, b: Tensor) -> Tensor:
        """`mul_mat` with a matrix that `tsgg.tiles` has regrouped: {k, m} and {k, n} -> {m, n}, F32. On the CPU.

        Raises `UsageError` where `b` is not a plain matrix.
        """
        if b.type != lib.GGML_TYPE_F32 or b.nb[0] != 4 or b.ne[2] != 1 or b.ne[3] != 1 or b.ne[0] != tiles.ne[0]:
            raise UsageError("a product with tiles takes F32 rows of the tiles' width as a plain matrix")
        return lib.tsgg_mul_tiles(self.ctx, tiles, b)

    def mul_mat_id(self, experts: Tensor, b: Tensor, ids: Tensor) -> Tensor:
        """{k, m, experts}, {k, used or 1, rows}, I32 {used, rows} -> {m, used, rows}"""
        return lib.ggml_mul_mat_id(self.ctx, experts, b, ids)

    def get_rows(self, table: Tensor, ids: Tensor) -> Tensor:
        """{n, rows}, I32 {k} -> {n, k} F32"""
        return lib.ggml_get_rows(self.ctx, table, ids)

    def set_rows(self, table: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        """Writes F32 `rows` {n, k, ...} at I64 `ids` {k, ...} into `table`; the result is a view of the table."""
        return lib.ggml_set_rows(self.ctx, table, rows, ids)

    def cpy(self, source: Tensor, destination: Tensor) -> Tensor:
        return lib.ggml_cpy(self.ctx, source, destination)

    def concat(self, a: Tensor, b: Tensor, dim: int) -> Tensor:
        return lib.ggml_concat(self.ctx, a, b, dim)

    def repeat(self, a: Tensor, *shape: int) -> Tensor:
        """`a` tiled to a shape of four entries."""
        return lib.ggml_repeat_4d(self.ctx, a, *(shape + (1,) * (4 - len(shape))))

    def argsort_top_k(self, a: Tensor, k: int) -> Tensor:
        """I32 {k, rows}, largest first (`ggml_top_k` would be unordered)"""
        return lib.ggml_argsort_top_k(self.ctx, a, k)

    # -- shapes ----------------------------------------------------------------------------------------------------

    def cont(self, a: Tensor) -> Tensor:
        return a if lib.ggml_is_contiguous(a) else lib.ggml_cont(self.ctx, a)

    def reshape(self, a: Tensor, *shape: int) -> Tensor:
        """`a` must be contiguous."""
        build = (lib.ggml_reshape_1d, lib.ggml_reshape_2d, lib.ggml_reshape_3d, lib.ggml_reshape_4d)[len(shape) - 1]
        return build(self.ctx, a, *shape)

    def permute(self, a: Tensor, x: int, y: int, z: int, w: int) -> Tensor:
        """Axis i of `a` becomes axis (x, y, z, w)[i] of the result: a view."""
        return lib.ggml_permute(self.ctx, a, x, y, z, w)

    def transpose(self, a: Tensor) -> Tensor:
        """Axes 0 and 1 exchanged: a view."""
        return lib.ggml_transpose(self.ctx, a)

    def view(self, a: Tensor, shape: tuple[int, ...], strides: tuple[int, ...] = (), offset: int = 0) -> Tensor:
        """A view; `strides` are bytes of axes 1.. (one fewer than axes), `offset` is in bytes."""
        build = (lib.ggml_view_1d, lib.ggml_view_2d, lib.ggml_view_3d, lib.ggml_view_4d)[len(shape) - 1]
        return build(self.ctx, a, *shape, *strides, offset)

    # -- attention -------------------------------------------------------------------------------------------------

    def soft_max(self, a: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """softmax(scale * a + mask) over axis 0. mask {n, >= rows, ...} F16 or F32, or None."""
        return lib.ggml_soft_max_ext(self.ctx, a, ffi.NULL if mask is None else mask, scale, 0.0)

    def flash_attn(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float = 0.0) -> Tensor:
        """q {d, rows, heads, s}, k and v {d, cells, kv heads, s}, mask F16 {cells, rows, 1, s} -> {d, heads, rows, s}"""
        result = lib.ggml_flash_attn_ext(self.ctx, q, k, v, mask, scale, 0.0, softcap)
        lib.ggml_flash_attn_ext_set_prec(result, lib.GGML_PREC_F32)
        return result

    def rope(self, a: Tensor, positions: Tensor, rope: Any, factors: Tensor | None = None) -> Tensor:
        """Rotary embedding of a {d, heads, rows} at I32 positions {rows}; `rope` is a `tsgg.models.base.Rope`."""
        mode = lib.GGML_ROPE_TYPE_NEOX if rope.neox else lib.GGML_ROPE_TYPE_NORMAL
        return lib.ggml_rope_ext(
            self.ctx, a, positions, ffi.NULL if factors is None else factors, rope.dims, mode, rope.original_context,
            rope.base, rope.scale, rope.ext_factor, rope.attention_factor, rope.beta_fast, rope.beta_slow,
        )  # fmt: skip

    # -- recurrence ------------------------------------------------------------------------------------------------

    def ssm_conv(self, a: Tensor, kernel: Tensor) -> Tensor:
        """Causal depthwise convolution: a {taps - 1 + rows, channels, s}, kernel {taps, channels} -> {channels, rows, s}"""
        return lib.ggml_ssm_conv(self.ctx, a, kernel)

    def gated_delta_net(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, snapshots: int
    ) -> Tensor:
        """q, k {d, key heads, rows, s}, v {d, heads, rows, s}, decay (log) and beta {1, heads, rows, s}, state {d, d, heads, s}.

        One F32 run: d * heads * rows * s outputs, then `snapshots` states {d, d, heads, s}: after the last row, the one
        before it, ... `state` is only read.
        """
        return lib.ggml_gated_delta_net(self.ctx, q, k, v, decay, beta, state, snapshots)
