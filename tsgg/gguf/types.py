"""The tensor types of ggml 0.15.3: how many elements and bytes one block holds.

Source: `enum ggml_type` in ggml.h and the block structs in ggml-common.h; checked against ggml itself by the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class TypeInfo:
    """Storage of one ggml tensor type."""

    name: str  # ggml's own spelling: "f32", "q4_K", "iq2_xxs"
    block_size: int  # elements in a block; a row is a whole number of blocks
    type_size: int  # bytes in a block


GGML_TYPES: Mapping[int, TypeInfo] = MappingProxyType(
    {
        0: TypeInfo("f32", 1, 4),
        1: TypeInfo("f16", 1, 2),
        2: TypeInfo("q4_0", 32, 18),
        3: TypeInfo("q4_1", 32, 20),
        6: TypeInfo("q5_0", 32, 22),
        7: TypeInfo("q5_1", 32, 24),
        8: TypeInfo("q8_0", 32, 34),
        9: TypeInfo("q8_1", 32, 36),
        10: TypeInfo("q2_K", 256, 84),
        11: TypeInfo("q3_K", 256, 110),
        12: TypeInfo("q4_K", 256, 144),
        13: TypeInfo("q5_K", 256, 176),
        14: TypeInfo("q6_K", 256, 210),
        15: TypeInfo("q8_K", 256, 292),
        16: TypeInfo("iq2_xxs", 256, 66),
        17: TypeInfo("iq2_xs", 256, 74),
        18: TypeInfo("iq3_xxs", 256, 98),
        19: TypeInfo("iq1_s", 256, 50),
        20: TypeInfo("iq4_nl", 32, 18),
        21: TypeInfo("iq3_s", 256, 110),
        22: TypeInfo("iq2_s", 256, 82),
        23: TypeInfo("iq4_xs", 256, 136),
        24: TypeInfo("i8", 1, 1),
        25: TypeInfo("i16", 1, 2),
        26: TypeInfo("i32", 1, 4),
        27: TypeInfo("i64", 1, 8),
        28: TypeInfo("f64", 1, 8),
        29: TypeInfo("iq1_m", 256, 56),
        30: TypeInfo("bf16", 1, 2),
        34: TypeInfo("tq1_0", 256, 54),
        35: TypeInfo("tq2_0", 256, 66),
        39: TypeInfo("mxfp4", 32, 17),
        40: TypeInfo("nvfp4", 64, 36),
        41: TypeInfo("q1_0", 128, 18),
    }
)

# Ids that older files carry and ggml no longer reads: id -> (old name, the type to convert to).
REMOVED_GGML_TYPES: Mapping[int, tuple[str, str]] = MappingProxyType(
    {
        4: ("q4_2", "q4_0"),
        5: ("q4_3", "q4_1"),
        31: ("q4_0_4_4", "q4_0"),
        32: ("q4_0_4_8", "q4_0"),
        33: ("q4_0_8_8", "q4_0"),
        36: ("iq4_nl_4_4", "iq4_nl"),
        37: ("iq4_nl_4_8", "iq4_nl"),
        38: ("iq4_nl_8_8", "iq4_nl"),
    }
)
