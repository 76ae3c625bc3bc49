"""Files of saved prefixes: what was written is read, and of whatever else lies in a file nothing is used."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from itertools import accumulate, chain
from pathlib import Path

import pytest

from tests.hostile import HostileFile, flips, run_in_child
from tests.saved_prefixes import BINDING, VOCAB, Forged, read, rows, some_records
from tsgg.engine import file
from tsgg.engine.records import Record, arrays, put, taken
from tsgg.engine.tree import PrefixTree
from tsgg.errors import TsggError


def same(found: Record, expected: Record) -> bool:
    pairs = zip(found.arrays(), expected.arrays(), strict=True)
    alike = all((a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()) for a, b in pairs)
    states = [state and (state.length, state.highest) for state in (found.state, expected.state)]
    return alike and found.parent == expected.parent and states[0] == states[1]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    file.write(tmp_path / "saved", BINDING, some_records())
    return tmp_path / "saved"


def test_what_is_written_is_read(saved: Path) -> None:
    assert all(map(same, read(saved), some_records()))
    assert len(read(saved)) == len(some_records())
    assert saved.read_bytes() == Forged().data(), "the format is as the tests know it"
    if os.name == "posix":
        assert stat.S_IMODE(saved.stat().st_mode) == 0o600, "prompts are nobody else's business"


def test_an_empty_tree_is_a_file_too(tmp_path: Path) -> None:
    file.write(tmp_path / "saved", BINDING, [])
    assert read(tmp_path / "saved") == []


@pytest.mark.parametrize("size", range(0, 40))
def test_of_a_small_budget_the_last_branches_are_read_with_all_that_they_go_on_from(saved: Path, size: int) -> None:
    records, budget = some_records(), size * 100
    found = read(saved, budget)
    costs = [sum(array.nbytes for array in arrays(record.cells, record.state)) for record in records]
    wanted: list[int] = []
    for path in ([4], [0, 2, 3], [0, 2], [0, 1], [0]):
        missing = [i for i in path if i not in wanted]
        if sum(costs[i] for i in (*wanted, *missing)) <= budget:
            wanted += missing
    assert [record.tokens for record in found] == [records[i].tokens for i in sorted(wanted)]
    for record in found:
        assert record.parent < 0 or found[record.parent].tokens in ([1, 2, 3, 4, 5], [8, 9, 10])


def test_a_tree_goes_to_records_and_back_with_the_order_of_its_use() -> None:
    tree = PrefixTree(rows(), 1 << 20)
    assert put(tree, some_records()) == 13 == len(tree)
    tree.check_integrity()
    list(tree.read([1, 2, 3, 4, 5, 6, 7], 0, 7))  # now the branch that ends with 7 is the last one
    again = taken(tree)
    assert [record.tokens for record in again] == [[1, 2, 3, 4, 5], [8, 9, 10], [11], [2, 2], [6, 7]]
    assert [record.parent for record in again] == [-1, 0, 1, -1, 0]
    assert again[0].cells is some_records()[0].cells, "rows are not copied"
    other = PrefixTree(rows(), 1 << 20)
    put(other, again)
    assert [record.tokens for record in taken(other)] == [record.tokens for record in again]


def test_records_meet_what_a_tree_knows_already() -> None:
    first, _, third, fourth, last = some_records()
    tree = PrefixTree(rows(), 1 << 20)
    put(tree, [Record(-1, [1, 2, 3], first.cells.part(0, 3), None)])
    assert put(tree, some_records()) == 13
    tree.check_integrity()
    assert tree.match([1, 2, 3, 4, 5, 8, 9, 10, 11], 9) == (match := tree.match([1, 2, 3, 4, 5, 8, 9, 10, 11, 12], 10))
    assert (match.length, match.state) == (9, fourth.state)
    pieces = [cells.lanes[0].tobytes() for _, cells in tree.read([1, 2, 3, 4, 5, 8, 9, 10], 5, 8)]
    assert pieces == [third.cells.lanes[0].tobytes()]
    small = PrefixTree(rows(), last.nbytes)
    assert put(small, some_records()) < 13
    small.check_integrity()


def test_an_interrupted_save_leaves_the_file_that_was_there(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    for failure, error in ((full, TsggError), (interrupted, KeyboardInterrupt)):
        monkeypatch.setattr(os, "fsync", failure)
        with pytest.raises(error):
            file.write(saved, BINDING, some_records()[:2])
        assert saved.read_bytes() == before
        assert os.listdir(saved.parent) == ["saved"]


def test_places_that_cannot_be_written_or_read_are_errors(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "saved", tmp_path / "a\0b"):
        with pytest.raises(TsggError):
            file.write(path, BINDING, some_records())
        with pytest.raises(TsggError):
            read(path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", BINDING)
def test_a_file_that_is_bound_to_something_else_is_refused_by_name(saved: Path, name: str) -> None:
    with pytest.raises(TsggError, match=f"another {name}"):
        file.read(saved, BINDING | {name: "other"}, rows(), VOCAB, 1 << 20)


# -- files that somebody damaged, or forged --------------------------------------------------------------------------------


def test_every_damage_is_refused() -> None:
    """Bytes flipped in every region, and files cut at every border of a part and beside it, or grown."""
    parts = Forged().parts()
    data, ends = b"".join(parts), [*accumulate(len(part) for part in parts)]
    regions = [0, *ends]
    cuts = {at for end in regions for at in (end - 1, end, end + 1) if 0 <= at < len(data)}
    files = chain(
        (HostileFile(f"cut at {at}", data[:at]) for at in sorted(cuts)),
        (
            HostileFile(f"byte {at} flipped", data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
            for at in range(len(data) - len(parts[-1]))
            if at < ends[-8] or at % 7 == 0
        ),
        flips(data, 300, seed=1),
        [HostileFile("a byte more", data + b"\0"), HostileFile("twice", data * 2), HostileFile("empty", b"")],
    )
    outcomes = run_in_child("tests.saved_prefixes:read", files)
    assert len(outcomes) > 500
    assert not [outcome for outcome in outcomes if outcome.kind != "refused"]


HUGE = 2**32 - 1


def entry(number: int, **changes: int) -> Callable[[Forged], None]:
    """An index entry with other values."""

    def change(forged: Forged) -> None:
        names = ("parent", "tokens", "highest", "nbytes")
        values = dict(zip(names, forged.index[number], strict=True)) | changes
        forged.index[number] = (values["parent"], values["tokens"], values["highest"], values["nbytes"])

    return change


def token(value: int) -> Callable[[Forged], None]:
    def change(forged: Forged) -> None:
        forged.blocks[1] = forged.blocks[1][:4] + value.to_bytes(4, "little", signed=True) + forged.blocks[1][8:]

    return change


FORGERIES: dict[str, tuple[Callable[[Forged], object], str]] = {
    "another magic": (lambda f: setattr(f, "magic", b"GGUF\0\0\0\0"), "is not a saved prefix cache"),
    "a later version": (lambda f: setattr(f, "version", 2), "version 2"),
    "a header of 4 GiB": (lambda f: setattr(f, "header_bytes", HUGE), "a header of"),
    "a header past the end": (lambda f: setattr(f, "header_bytes", file.MOST_HEADER), "too early"),
    "nodes past the end": (lambda f: setattr(f, "nodes", HUGE), "too early"),
    "a node too few": (lambda f: setattr(f, "nodes", 4), "checksum"),
    "no JSON": (lambda f: setattr(f, "header", b"{"), "header cannot be read"),
    "no text": (lambda f: setattr(f, "header", b"\xff\xfe"), "header cannot be read"),
    "deep JSON": (lambda f: setattr(f, "header", b"[" * 100_000), "header cannot be read"),
    "JSON of another kind": (lambda f: setattr(f, "header", b"[]"), "header cannot be read"),
    "an entry more": (lambda f: setattr(f, "header", b'{"model file": "abc", "device": "CPU", "x": 1}'), "header"),
    "a lone surrogate": (
        lambda f: setattr(f, "header", b'{"model file": "\\ud800", "device": "CPU"}'),
        "another model",
    ),
    "its own parent": (entry(1, parent=1), "has the parent 1"),
    "a parent that comes later": (entry(1, parent=3), "has the parent 3"),
    "a parent before the root": (entry(1, parent=-2), "has the parent -2"),
    "no tokens": (entry(2, tokens=0), "has 0 tokens"),
    "4 billion tokens": (entry(2, tokens=HUGE, nbytes=2**62), "tokens up to"),
    "a token more than its block": (entry(2, tokens=4), "expected"),
    "a block of another length": (entry(2, nbytes=7), "has 7 bytes"),
    "a huge block": (entry(2, nbytes=2**64 - 1), "expected"),
    "a state that was left out": (entry(1, highest=0), "expected"),
    "a state where there is none": (entry(2, highest=8), "expected"),
    "a state behind its end": (entry(1, highest=6), "a state up to 6"),
    "a state of 4 billion tokens": (entry(1, highest=HUGE), "a state up to"),
    "a token id beside the vocabulary": (token(VOCAB), "token ids"),
    "a negative token id": (token(-1), "token ids"),
    "a block more": (lambda f: f.blocks.append(b"1234"), "bytes follow the index"),
    "a block less": (lambda f: f.blocks.pop(), "bytes follow the index"),
}


def test_a_file_with_right_checksums_is_not_believed_either() -> None:
    forgeries = []
    for label, (change, _) in FORGERIES.items():
        forged = Forged()
        change(forged)
        forgeries.append(HostileFile(label, forged.data()))
    outcomes = run_in_child("tests.saved_prefixes:read", forgeries)
    for outcome, (_, message) in zip(outcomes, FORGERIES.values(), strict=True):
        assert outcome.kind == "refused" and message in outcome.detail, outcome
