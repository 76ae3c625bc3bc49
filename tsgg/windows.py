"""How many rows a device multiplies at the price of few: the window that a model prefers there.

ggml's GPU backends have kernels for up to 8 columns that read a weight once, and dearer ones beyond; which types they cover
differs. Boundaries of ggml 0.15.3: reference/ggml.md, section 4. On the CPU a row costs what the one before it cost: there is no
boundary, and the window is a matter of what its rows are measured to cost (the governor's).
"""

from __future__ import annotations

from collections.abc import Mapping

from tsgg.gguf import GGML_TYPES

FEW_ROWS = 8  # columns of the small-batch kernels: a verify of 9 rows costs half as much again as one of 8
COVERED_BY_METAL = frozenset(
    "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 MXFP4 IQ4_NL Q2_K Q3_K Q4_K Q5_K Q6_K".split()  # noqa: SIM905 - read as a list
)
ROW_BY_ROW = 3  # drafts where every row reads the weights anew: a rejected one costs a step
FLOATS = frozenset(("F32", "F16", "BF16"))
MUCH = 0.1  # of a model's bytes: from this share on a type decides what a verify costs


def preferred_window(arch: int | None, device: str, sizes: Mapping[int, int]) -> int | None:
    """Most drafts of a verify by default, or None for no preference: the architecture's wish, and the device's.

    `device` is ggml's name of it ("CPU", "CUDA0", "Metal", ...); `sizes` are the bytes of each ggml type that are multiplied.
    """
    wishes = [wish for wish in (arch, _of_device(device.lower(), sizes)) if wish is not None]
    return min(wishes, default=None)


def _of_device(device: str, sizes: Mapping[int, int]) -> int | None:
    if device.startswith("cpu"):
        return None
    total = sum(sizes.values()) or 1
    large = {GGML_TYPES[kind].name.upper() for kind, size in sizes.items() if size > MUCH * total}
    if device.startswith(("metal", "mtl")) and not large <= COVERED_BY_METAL:
        return ROW_BY_ROW
    if device.startswith("cuda") and large <= FLOATS:
        return None  # tensor cores take 16 columns
    return FEW_ROWS - 1
