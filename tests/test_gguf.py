"""The GGUF reader against an independent writer, the `gguf` package, ggml itself and thousands of damaged files."""

from __future__ import annotations

import math
import os
import struct
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from tests import gguf_writer as w
from tests.hostile import HostileFile, flips, run_in_child, truncations
from tsgg.errors import ModelFileError, TsggError, UnsupportedError
from tsgg.gguf import GGML_TYPES, REMOVED_GGML_TYPES, Metadata, read_gguf

MB = 2**20
SCALARS: dict[str, object] = {
    "general.architecture": "llama",
    "u8": np.uint8(255),
    "i8": np.int8(-128),
    "u16": np.uint16(65535),
    "i16": np.int16(-32768),
    "u32": np.uint32(2**32 - 1),
    "i32": np.int32(-(2**31)),
    "f32": np.float32(0.1),
    "yes": True,
    "no": False,
    "text": "naïve 日本 🙂",
    "empty": "",
    "u64": np.uint64(2**64 - 1),
    "i64": np.int64(-(2**63)),
    "f64": np.float64(0.1),
}
ARRAYS = {
    "floats": np.array([1.5, -2.0, np.inf], "<f4"),
    "ints": np.array([-1, 2**31 - 1], "<i4"),
    "bytes": np.array([0, 255], "<u1"),
    "doubles": np.array([0.1], "<f8"),
    "none": np.array([], "<u4"),
    "flags": np.array([True, False, True]),
}
TOKENS = ["<s>", "", "\u2581the", "🙂", "a\nb"]


def tiny_model() -> bytes:
    """A file of about 1.5 KB with every value type and three tensors, the last of them quantized."""
    metadata = {**SCALARS, **ARRAYS, "tokens": TOKENS}
    return w.gguf_bytes(metadata, [w.f32("a", np.ones((3, 2))), w.f32("b", [1.0]), ("q", (32, 4), 8, bytes(4 * 34))])


def read_and_check(path: str) -> None:
    """What the hostile tests call: a file that loads must keep every promise of TensorInfo."""
    size = os.path.getsize(path)
    file = read_gguf(path)
    for name, info in file.tensors.items():
        kind = GGML_TYPES[info.type]
        assert info.name == name and 1 <= len(info.shape) <= 4 and min(info.shape) > 0
        assert info.nbytes == math.prod(info.shape) // kind.block_size * kind.type_size
        assert 24 < info.offset <= info.offset + info.nbytes <= size and info.offset % file.alignment == 0


# ---- well-formed files


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type_reads_back_as_written(tmp_path: Path, version: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(w.gguf_bytes({**SCALARS, **ARRAYS, "tokens": TOKENS}, version=version))
    metadata = read_gguf(path).metadata
    assert list(metadata) == [*SCALARS, *ARRAYS, "tokens"]
    for key, value in SCALARS.items():
        plain = value.item() if isinstance(value, np.generic) else value
        assert metadata[key] == plain and type(metadata[key]) is type(plain), key
    for key, array in ARRAYS.items():
        found = metadata.get_array(key)
        assert found.dtype == array.dtype and not found.flags.writeable, key
        np.testing.assert_array_equal(found, array)
    assert metadata["tokens"] == TOKENS


@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_the_bytes_of_every_tensor_lie_where_the_reader_says(tmp_path: Path, alignment: int) -> None:
    rng = np.random.default_rng(1)
    tensors = [
        w.f32("plain", rng.random((3, 5))),
        ("cube", (32, 3, 2, 2), 8, rng.bytes(12 * 34)),
        ("k-quant", (512, 2), 12, rng.bytes(4 * 144)),
        ("scalar", (), 0, rng.bytes(4)),  # no dimension at all: ggml reads one element
    ]
    file = read_gguf(w.write_gguf(tmp_path / "m.gguf", {"general.alignment": alignment}, tensors))
    data = file.paths[0].read_bytes()
    assert file.alignment == alignment
    assert list(file.tensors) == [name for name, *_ in tensors]
    for name, ne, kind, raw in tensors:
        info = file.tensors[name]
        assert (info.shape, info.type, info.file) == (tuple(ne) or (1,), kind, 0)
        assert data[info.offset : info.offset + info.nbytes] == raw and info.offset % alignment == 0


def test_a_token_that_is_not_utf8_keeps_its_bytes(tmp_path: Path) -> None:
    raw = [b"\xff\xfe", b"ok", b"\xe6\x97", b"\xc0"]
    tokens = read_gguf(w.write_gguf(tmp_path / "m.gguf", {"tokens": raw})).metadata.get_strings("tokens")
    assert [token.encode("utf-8", "surrogateescape") for token in tokens] == raw


def test_the_file_is_closed_and_unchanged_after_reading_and_after_an_error(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.gguf", tmp_path / "bad.gguf"
    good.write_bytes(tiny_model())
    bad.write_bytes(tiny_model()[:-200])
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in (good, bad)]
    handles = Path("/proc/self/fd")
    count = len(list(handles.iterdir())) if handles.exists() else 0
    kept = read_gguf(good)
    with pytest.raises(ModelFileError) as caught:
        read_gguf(bad)
    if handles.exists():
        assert len(list(handles.iterdir())) == count
    assert [(path.read_bytes(), path.stat().st_mtime_ns) for path in (good, bad)] == before
    for path in (good, bad):
        path.unlink()  # Windows refuses this while a mapping is open
    assert kept.metadata.get_array("floats")[0] == 1.5 and "bad.gguf" in str(caught.value)


@pytest.mark.parametrize("name", ["trunks/llama.gguf", "trunks/qwen35-moe-mtp.gguf", "vocab/ggml-vocab-llama-spm.gguf"])
def test_golden_files_read_as_the_gguf_package_reads_them(golden_dir: Path, name: str) -> None:
    gguf = pytest.importorskip("gguf")
    theirs, ours = gguf.GGUFReader(golden_dir / name), read_gguf(golden_dir / name)
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert set(ours.metadata) == set(fields)
    for key, field in fields.items():
        value, expected = ours.metadata[key], field.contents()
        if isinstance(value, np.ndarray):
            assert value.dtype == field.parts[field.data[0]].dtype
            value = value.tolist()
        assert value == expected, key
    found = [(t.name, t.type, t.shape, t.offset, t.nbytes) for t in ours.tensors.values()]
    assert found == [
        (t.name, int(t.tensor_type), tuple(t.shape.tolist()), int(t.data_offset), int(t.n_bytes))
        for t in theirs.tensors
    ]


# ---- the type table


def test_the_type_table_is_that_of_ggml() -> None:
    lib = pytest.importorskip("tsgg.ggml.library").lib
    for kind in range(lib.GGML_TYPE_COUNT):
        size = lib.ggml_blck_size(kind), lib.ggml_type_size(kind)
        info = GGML_TYPES.get(kind)
        assert (
            (kind in REMOVED_GGML_TYPES and size == (0, 0))
            if info is None
            else (info.block_size, info.type_size) == size
        )
    assert max(GGML_TYPES) < lib.GGML_TYPE_COUNT


def test_the_type_table_agrees_with_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    sizes = {int(kind): (kind.name.lower(), *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    del sizes[9]  # q8_1: the package says 40 bytes, ggml-common.h asserts 36
    ours = {kind: (info.name.lower(), info.block_size, info.type_size) for kind, info in GGML_TYPES.items()}
    known = ours.keys() & sizes.keys()
    assert len(known) >= 30 and {kind: sizes[kind] for kind in known} == {kind: ours[kind] for kind in known}
    assert not REMOVED_GGML_TYPES.keys() & ours.keys()


# ---- typed getters


def test_a_getter_names_key_found_type_and_expected_type() -> None:
    values = {"i": 3, "f": 1.5, "b": True, "s": "x", "a": np.zeros(2, "<f4"), "t": ["x", "y"], "nan": math.nan}
    metadata = Metadata(values, "m.gguf")
    getters: dict[Callable[..., object], tuple[str, str]] = {
        metadata.get_int: ("i", "an integer"),
        metadata.get_float: ("if", "a float"),
        metadata.get_bool: ("b", "a bool"),
        metadata.get_str: ("s", "a string"),
        metadata.get_array: ("a", "an array of numbers"),
        metadata.get_strings: ("t", "an array of strings"),
    }
    described = {
        "i": "an integer",
        "f": "a float",
        "b": "a bool",
        "s": "a string",
        "a": "an array of 2 float32",
        "t": "an array of 2 strings",
    }
    for get, (accepted, expected) in getters.items():
        for key, found in described.items():
            if key in accepted:
                assert get(key) is values[key] or get(key) == values[key]
                continue
            with pytest.raises(ModelFileError, match=f"^m.gguf: {key} is {found}, expected {expected}"):
                get(key)
            with pytest.raises(ModelFileError):
                get(key, None)  # a default is for a missing key, not for a wrong one
        assert get("absent", None) is None
        with pytest.raises(ModelFileError, match="absent is missing"):
            get("absent")
    with pytest.raises(ModelFileError, match="finite"):
        metadata.get_float("nan")
    assert metadata.get_int("i", low=3, high=3) == 3
    bounds: dict[str, int]
    for bounds in ({"low": 4}, {"high": 2}, {"low": 4, "high": 9}):
        with pytest.raises(ModelFileError, match="i is 3, expected"):
            metadata.get_int("i", **bounds)


def test_the_architecture_is_a_printable_name(tmp_path: Path) -> None:
    assert read_gguf(w.write_gguf(tmp_path / "m.gguf", {"general.architecture": "glm-dsa"})).architecture == "glm-dsa"
    for values in ({}, {"general.architecture": ""}, {"general.architecture": "\udcff"}, {"general.architecture": 3}):
        with pytest.raises(ModelFileError, match=r"general\.architecture"):
            _ = Metadata(values).architecture


# ---- split models


def write_parts(folder: Path, parts: list[list[w.Tensor]], total: int) -> list[Path]:
    paths = []
    for i, tensors in enumerate(parts):
        keys = {"split.no": np.uint16(i), "split.count": np.uint16(len(parts)), "split.tensors.count": np.int32(total)}
        metadata = {"general.architecture": "llama", **keys} if i == 0 else keys
        paths.append(w.write_gguf(folder / f"m-{i + 1:05d}-of-{len(parts):05d}.gguf", metadata, tensors))
    return paths


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_part_of_a_split_model_leads_to_all_of_them(tmp_path: Path, given: int) -> None:
    tensors = [w.f32(name, np.full(4, i)) for i, name in enumerate("abcde")]
    paths = write_parts(tmp_path, [tensors[:2], tensors[2:3], tensors[3:]], 5)
    file = read_gguf(paths[given])
    assert file.paths == tuple(paths) and file.architecture == "llama"
    assert list(file.tensors) == list("abcde")
    for (_, _, _, raw), info, part in zip(tensors, file.tensors.values(), [0, 0, 1, 2, 2], strict=True):
        assert info.file == part
        assert paths[part].read_bytes()[info.offset : info.offset + info.nbytes] == raw


def test_a_broken_set_of_parts_is_refused_by_name(tmp_path: Path) -> None:
    def parts(names: str = "abc", total: int = 3) -> list[Path]:
        return write_parts(tmp_path, [[w.f32(name, [1.0])] for name in names], total)

    paths = parts()
    paths[1].unlink()
    with pytest.raises(ModelFileError, match=r"1 of 3 parts.* missing: m-00002-of-00003\.gguf"):
        read_gguf(paths[2])
    paths = parts()
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(ModelFileError, match=r"m-00002-of-00003\.gguf: holds part 3 of 3.* part 2 of 3"):
        read_gguf(paths[0])
    with pytest.raises(ModelFileError, match="tensor 'a' is in an earlier part"):
        read_gguf(parts(names="aba")[0])
    with pytest.raises(ModelFileError, match=r"hold 3 tensors, split\.tensors\.count says 4"):
        read_gguf(parts(total=4)[0])
    renamed = parts()[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match=r"one of 3 parts.*-NNNNN-of-00003\.gguf"):
        read_gguf(renamed)


# ---- malformed files


def kv(kind: int, payload: bytes, key: str = "k") -> bytes:
    """A file with one metadata entry."""
    return w.header(0, 1) + w.string(key) + struct.pack("<I", kind) + payload


def entries(*raw: bytes, data: int = 128) -> bytes:
    """A file with these tensor entries and a data section of `data` bytes."""
    head = w.header(len(raw), 0) + b"".join(raw)
    return head + bytes(-len(head) % 32) + bytes(data)


def one(name: str | bytes = "t", ne: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return entries(w.tensor_entry(name, ne, kind, offset))


def aligned(value: object) -> bytes:
    return w.header(0, 1) + w.key_value("general.alignment", value)


HUGE = struct.pack("<Q", 2**61)
FAR = struct.pack("<Q", 2**64 - 1)
ENTRY = w.tensor_entry("t", (4,), 0, 0)
MALFORMED: dict[str, tuple[bytes, type[TsggError], str]] = {
    "empty": (b"", ModelFileError, "0 bytes long, expected at least the 24"),
    "23 bytes": (w.header(0, 0)[:-1], ModelFileError, "23 bytes long"),
    "another format": (b"version https://git-lfs" + bytes(99), ModelFileError, "starts with b'vers', expected b'GGUF'"),
    "version 1": (w.header(0, 0, 1), UnsupportedError, "byte 4: GGUF version 1, expected 2 or 3"),
    "version 4": (w.header(0, 0, 4), UnsupportedError, "GGUF version 4"),
    "version 0": (w.header(0, 0, 0), UnsupportedError, "GGUF version 0"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), UnsupportedError, "big-endian"),
    "tensor count": (w.header(2**63, 0) + bytes(9), ModelFileError, "byte 8: 9223372036854775808 tensors, but only 9"),
    "key count": (w.header(0, 2**63) + bytes(99), ModelFileError, "byte 16: 9223372036854775808 metadata keys"),
    "key length": (
        w.header(0, 1) + HUGE + bytes(9),
        ModelFileError,
        "byte 24: a metadata key of 2305843009213693952 b",
    ),
    "key past the end": (w.header(0, 1) + b"\x63" + bytes(19), ModelFileError, "needs 99 bytes, but the file ends"),
    "empty key": (kv(4, bytes(4), ""), ModelFileError, "a metadata key of 0 bytes"),
    "key not UTF-8": (w.header(0, 1) + w.string(b"\xff") + bytes(9), ModelFileError, "expected UTF-8"),
    "key twice": (
        w.header(0, 2) + 2 * w.key_value("k", 1),
        ModelFileError,
        r"byte 41: the metadata key 'k' occurs twice",
    ),
    "value type": (kv(13, bytes(8)), ModelFileError, "byte 33: the metadata key 'k' has the value type 13"),
    "value cut": (kv(10, bytes(7)), ModelFileError, "needs 8 bytes"),
    "string length": (kv(8, HUGE), ModelFileError, "a string of 'k' needs 2305843009213693952 bytes"),
    "string length wraps": (kv(8, FAR + b"abc"), ModelFileError, "needs 18446744073709551615 bytes"),
    "array length": (kv(9, struct.pack("<I", 6) + HUGE), ModelFileError, "2305843009213693952 elements in 'k'"),
    "string array length": (
        kv(9, struct.pack("<I", 8) + HUGE + bytes(16)),
        ModelFileError,
        "strings in 'k', but only 16",
    ),
    "bool array length": (kv(9, struct.pack("<I", 7) + HUGE), ModelFileError, "elements in 'k', but only 0"),
    "array of arrays": (kv(9, struct.pack("<IQ", 9, 0)), UnsupportedError, "'k' is an array of arrays"),
    "element type": (kv(9, struct.pack("<IQ", 99, 0)), ModelFileError, "element type 99"),
    "string in array cut": (
        kv(9, struct.pack("<IQ", 8, 2) + w.string("ab") + w.string("cd")[:-1]),
        ModelFileError,
        "needs 2 bytes, but the file ends at 68",
    ),
    "string in array cut before its text": (
        kv(9, struct.pack("<IQ", 8, 2) + w.string("ab") + bytes(6)),
        ModelFileError,
        "byte 59: a string of 'k' needs 8 bytes, but the file ends at 65",
    ),
    "alignment 0": (aligned(0), ModelFileError, "alignment is 0, expected 1 to 2097152"),
    "alignment 48": (aligned(48), ModelFileError, "alignment is 48, expected a power of two"),
    "alignment 2^31": (aligned(2**31), ModelFileError, "expected 1 to"),
    "alignment text": (aligned("32"), ModelFileError, "alignment is a string, expected an integer"),
    "name of 64 bytes": (one("n" * 64), ModelFileError, "a tensor name of 64 bytes, expected 1 to 63"),
    "empty name": (one(""), ModelFileError, "a tensor name of 0 bytes"),
    "name not UTF-8": (one(b"\xe6\x97"), ModelFileError, "expected UTF-8"),
    "NUL in name": (one("a\0b"), ModelFileError, "NUL"),
    "name twice": (
        entries(ENTRY, w.tensor_entry("t", (4,), 0, 32)),
        ModelFileError,
        "byte 57: the tensor 't' occurs twice",
    ),
    "five dimensions": (one(ne=(1,) * 5), ModelFileError, "5 dimensions, expected at most 4"),
    "zero dimension": (one(ne=(4, 0)), ModelFileError, r"shape \(4, 0\), expected 1 to 2\^63-1 elements"),
    "dimensions overflow": (one(ne=(2**32, 2**32)), ModelFileError, "shape"),
    "dimension wraps to 4": (one(ne=(2**62, 2**62, 2**62, 4)), ModelFileError, "shape"),
    "negative dimension": (one(ne=(2**64 - 4,)), ModelFileError, "shape"),
    "broken block": (
        one(ne=(33,), kind=8),
        ModelFileError,
        "type q8_0 has rows of 33 elements, expected a multiple of 32",
    ),
    "removed type": (one(ne=(32,), kind=31), UnsupportedError, r"byte 45: the tensor 't' has the type q4_0_4_4 \(31\)"),
    "unknown type": (one(kind=42), UnsupportedError, "the tensor 't' has the type id 42"),
    "negative type": (one(kind=2**32 - 1), UnsupportedError, "the type id 4294967295"),
    "misaligned offset": (one(offset=4), ModelFileError, "the offset 4, expected a multiple of 32"),
    "past the end": (one(ne=(33,)), ModelFileError, r"ends at byte 196, but the file ends at 192"),
    "one byte short": (entries(ENTRY, data=15), ModelFileError, "ends at byte 80, but the file ends at 79"),
    "offset past the end": (one(offset=2**64 - 32), ModelFileError, "ends at byte 18446744073709551664"),
    "overlap": (
        entries(w.tensor_entry("b", (9,), 0, 0), w.tensor_entry("a", (4,), 0, 32)),
        ModelFileError,
        "'a' starts at byte 128, inside 'b', which ends at 132",
    ),
    "same place": (entries(ENTRY, w.tensor_entry("u", (4,), 0, 0)), ModelFileError, "inside 't'"),
    "no data section": (w.header(1, 0) + ENTRY, ModelFileError, "but the file ends at 57"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_is_refused_with_path_place_and_reason(tmp_path: Path, case: str) -> None:
    data, error, message = MALFORMED[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(error, match=message) as caught:
        read_gguf(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_what_is_no_readable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="is a directory, expected a"):
        read_gguf(tmp_path)
    with pytest.raises(ModelFileError, match=r"absent\.gguf: cannot be read"):
        read_gguf(tmp_path / "absent.gguf")
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_gguf("nul\0byte.gguf")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.gguf")  # opening it would wait forever
        with pytest.raises(ModelFileError, match="not a regular file"):
            read_gguf(tmp_path / "pipe.gguf")
    if hasattr(os, "geteuid") and os.geteuid() != 0:  # root reads everything
        locked = w.write_gguf(tmp_path / "locked.gguf", {})
        locked.chmod(0)
        with pytest.raises(ModelFileError, match="cannot be read"):
            read_gguf(locked)


# ---- hostile files, in child processes


def header_bytes(path: Path) -> int:
    return min(info.offset for info in read_gguf(path).tensors.values())


def assert_no_damage_gets_through(path: Path) -> None:
    """Every truncation of the tensors is refused, every header bit flip refused or harmless."""
    data, header = path.read_bytes(), header_bytes(path)
    end = max(info.offset + info.nbytes for info in read_gguf(path).tensors.values())
    files = chain(truncations(data, header, seed=1), flips(data, 2000, seed=2, within=header))
    outcomes = run_in_child("tests.test_gguf:read_and_check", files)
    assert [outcome for outcome in outcomes if not outcome.passed] == []
    cut = [o for o in outcomes if o.label.startswith("cut") and int(o.label.split()[2]) < end]
    assert len(cut) >= header and {o.kind for o in cut} == {"refused"}
    flipped = [o.kind for o in outcomes if "flipped" in o.label]
    assert len(flipped) == 2000 and 0 < flipped.count("loaded") < 2000


def test_truncations_and_bit_flips_of_a_tiny_file_never_get_through(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_model())
    assert_no_damage_gets_through(path)


def test_truncations_and_bit_flips_of_a_golden_file_never_get_through(golden_dir: Path) -> None:
    assert_no_damage_gets_through(golden_dir / "trunks" / "llama.gguf")


def test_no_one_megabyte_file_makes_the_reader_take_64_megabytes() -> None:
    def filled(kind: int, size: int, element: bytes) -> bytes:
        count = (MB - 64) // len(element)
        return kv(9, struct.pack("<IQ", kind, count) + element * count)

    names = [f"{i:05x}" for i in range(MB // 48)]
    dense = {
        "two-character strings": filled(8, 10, w.string("ab")),
        "empty strings": filled(8, 8, w.string("")),
        "one long wide string": kv(8, w.string("🙂" + "a" * (MB - 100))),
        "bools": filled(7, 1, b"\1"),
        "keys": w.header(0, len(names)) + b"".join(w.key_value(name, "") for name in names),
        "tensors": w.header(len(names), 0) + b"".join(w.tensor_entry(name, (1,), 24, 0) for name in names),
    }
    bombs = {case: data + bytes(MB) for case, (data, *_) in MALFORMED.items() if "length" in case or "count" in case}
    files = [HostileFile(label, data) for label, data in {**dense, **bombs}.items()]
    outcomes = run_in_child("tests.test_gguf:read_gguf", files)
    refused = {"tensors", *bombs}  # all tensors in one place: parsed, then refused for overlapping
    assert [(o.label, o.kind) for o in outcomes] == [
        (file.label, "refused" if file.label in refused else "loaded") for file in files
    ]


def misbehave(path: str) -> None:
    """A loader with every fault that the runner must notice, chosen by the file's content."""
    what = Path(path).read_text()
    if what == "raise":
        raise KeyError("k")
    if what == "unprintable":
        raise ModelFileError("\udcff")
    if what == "abort":
        os.abort()
    if what == "exit":
        os._exit(0)
    if what == "hang":
        time.sleep(60)
    if what == "refuse":
        raise ModelFileError("no")


def test_the_runner_names_the_file_that_broke_the_loader() -> None:
    wants = {"load": "loaded", "raise": "raised", "abort": "died", "refuse": "refused", "exit": "died"}
    wants |= {"unprintable": "raised", "hang": "hung", "load again": "loaded"}
    files = [HostileFile(what, what.encode()) for what in wants]
    outcomes = run_in_child("tests.test_gguf:misbehave", files, timeout_s=2.0)
    assert {outcome.label: outcome.kind for outcome in outcomes} == wants
    assert [outcome.label for outcome in outcomes if outcome.passed] == ["load", "refuse", "load again"]
    with pytest.raises(RuntimeError, match="could not import"):
        run_in_child("tests.test_gguf:absent", files)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system has no enforced address space limit")
def test_the_runner_notices_memory_out_of_proportion() -> None:
    (outcome,) = run_in_child("tests.test_gguf:take_100_megabytes", [HostileFile("any", b"")])
    assert outcome.kind == "raised" and "MemoryError" in outcome.detail


def take_100_megabytes(path: str) -> None:
    bytearray(100 * MB)
