"""What an engine has computed outlives it: the next one of the same model file goes on from the same rows, or from none."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chat_models import write_chat_model
from tests.engine_requests import DRAFTING, KINDS, PLAIN, CheckedEngine, Wish, alone, engine, text, tokens_of, write
from tests.test_exact_rows import CACHES
from tests.tiny_models import TinyLlama, write_tiny
from tsgg import LLM
from tsgg.engine import file
from tsgg.errors import TsggError, UsageError
from tsgg.fingerprint import fingerprint
from tsgg.memory.memory import PROMPT_END
from tsgg.model import Model
from tsgg.settings import settings

SHARED = text(150, 99)
FIRST = (
    Wish(SHARED + text(300, 1), 10, 1.0, 4, narrow=True),
    Wish(SHARED + text(61, 2), 15, 1.0, 5),
    Wish(text(70, 4), 12, 0.0),
)


def run(running: CheckedEngine, wish: Wish) -> tuple[int, tuple[int, ...]]:
    """Cached tokens, and the stream."""
    stream = wish.submit(running, most_unread=None)
    return stream.wait().cached_tokens, tokens_of(stream)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("types", CACHES, ids="/".join)
def test_the_next_engine_goes_on_where_the_last_one_was(tmp_path: Path, kind: str, types: tuple[str, str]) -> None:
    """Chats go on from their answers, prompts come again: the same tokens as alone, from rows that were not computed again."""
    with engine(tmp_path, kind, 2, types) as running:
        answers = [run(running, wish)[1] for wish in FIRST]
        saved = running.save(tmp_path / "saved")
        assert saved == running.call(lambda: len(running.cache.tree))
    seconds = [
        Wish(wish.prompt + answer + text(20, 7), 10, 1.0, 3) for wish, answer in zip(FIRST, answers, strict=True)
    ]
    with engine(tmp_path, kind, 3, types, n_ctx=900) as running:  # slots and context may be others
        assert running.restore(tmp_path / "saved") == saved
        running.call(running.check_integrity)
        found = [run(running, second) for second in seconds]
    assert [cached for cached, _ in found] == [len(second.prompt) - 20 - 1 for second in seconds], "all that had rows"
    path, (k, v) = write(tmp_path, kind), types
    with Model(path, n_ctx=900, n_threads=1, cache_type_k=k, cache_type_v=v) as model:
        assert [tokens for _, tokens in found] == [alone(model, second) for second in seconds]


@pytest.mark.parametrize("kind", KINDS)
def test_requests_run_while_they_are_saved_and_what_they_hold_is_saved_too(tmp_path: Path, kind: str) -> None:
    long = Wish(text(300, 1), 100)
    with engine(tmp_path, kind, options=DRAFTING) as running:
        stream = long.submit(running)
        first = stream.read()
        assert first is not None
        assert running.save(tmp_path / "saved") >= 300
        whole = first.tokens + tokens_of(stream)
    with engine(tmp_path, kind) as running:
        running.restore(tmp_path / "saved")
        again = Wish(long.prompt + whole[:1] + text(9, 4), 10)
        cached, found = run(running, again)
        # A recurrent state stands where a chunk ended, or where the slot stood, which may be further on already.
        assert cached == 301 or (kind == "qwen35" and cached == 300 - PROMPT_END)
    with Model(write(tmp_path, kind), n_ctx=700, n_threads=1) as model:
        assert whole == alone(model, long)
        assert found == alone(model, again)


def test_what_comes_back_is_forgotten_as_anything_else_and_last_used_last(tmp_path: Path) -> None:
    wishes = [Wish(text(100, seed), 1) for seed in range(6)]
    with engine(tmp_path, slots=1) as running:
        for wish in wishes:
            run(running, wish)
        everything = running.save(tmp_path / "saved")
        size = running.call(lambda: running.cache.tree.nbytes)
    with engine(tmp_path, slots=1, cache_bytes=size // 2) as running:
        assert running.restore(tmp_path / "saved") == everything // 2
        found = [running.call(lambda w=wish: running.cache.found(list(w.prompt), 99, [])) for wish in wishes]  # type: ignore[misc]
        assert found == [0, 0, 0, 99, 99, 99]
        running.forget()
        assert running.call(lambda: len(running.cache.tree)) == 0
        assert running.restore(tmp_path / "saved") == everything // 2
    with engine(tmp_path, cache_bytes=0) as running:
        assert running.restore(tmp_path / "saved") == 0


def test_restoring_beside_what_is_there_adds_what_is_missing(tmp_path: Path) -> None:
    with engine(tmp_path) as running:
        run(running, FIRST[0])
        saved = running.save(tmp_path / "saved")
        assert running.restore(tmp_path / "saved") == saved
        assert running.call(lambda: len(running.cache.tree)) == saved
        running.forget()
        run(running, FIRST[1])
        running.restore(tmp_path / "saved")
        running.call(running.check_integrity)
        assert running.save(tmp_path / "saved") == saved + 61 + 15 - 1
        assert run(running, FIRST[0])[0] == len(FIRST[0].prompt) - 1


def test_a_whole_cache_comes_back_while_requests_run(tmp_path: Path) -> None:
    long = Wish(text(20, 1), 250)
    with engine(tmp_path) as running:
        run(running, FIRST[0])
        running.save(tmp_path / "saved")
        stream = long.submit(running, most_unread=None)
        saver = threading.Thread(target=running.save, args=(tmp_path / "other",))
        saver.start()
        for _ in range(5):
            running.restore(tmp_path / "saved")
        saver.join()
        found = tokens_of(stream)
    with Model(write(tmp_path, "llama"), n_ctx=700, n_threads=1) as model:
        assert found == alone(model, long)


# -- bound to the file, the machine and the build ------------------------------------------------------------------------


def copied(path: Path, change: Callable[[bytearray, Model], None]) -> Path:
    """The model file again, with bytes changed."""
    with Model(path, n_ctx=64, n_threads=1) as model:
        data = bytearray(path.read_bytes())
        change(data, model)
    other = path.with_name("other.gguf")
    other.write_bytes(data)
    return other


def flip_end(data: bytearray, model: Model) -> None:
    info = model.file.tensors["blk.1.ffn_down.weight"]
    data[info.offset + info.nbytes - 1] ^= 1


def load(path: Path, **arguments: object) -> CheckedEngine:
    return CheckedEngine(Model(path, **{"n_ctx": 300, "n_threads": 1, **arguments}), PLAIN, 1 << 20)  # type: ignore[arg-type]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with load(write(tmp_path, "llama")) as running:
        run(running, FIRST[2])
        running.save(tmp_path / "saved")
    return tmp_path / "saved"


def refused(running: CheckedEngine, saved: Path, message: str) -> None:
    with running, pytest.raises(TsggError, match=message):
        running.restore(saved)
    assert len(running.cache.tree) == 0


def test_a_copy_of_the_model_file_is_the_same_file_and_any_change_is_another(saved: Path) -> None:
    path = saved.parent / "llama.gguf"
    with load(copied(path, lambda data, model: None)) as running:
        assert running.restore(saved) == 70 + 12 - 1
    refused(load(copied(path, flip_end)), saved, "another model file")
    refused(load(copied(path, lambda data, model: data.extend(b"\0"))), saved, "another model file")
    other = write_tiny(saved.parent / "seed.gguf", TinyLlama(context=2048, seed=5))
    refused(load(other), saved, "another model file")
    with load(path, n_threads=2, n_seq=3, n_ctx=400) as running:
        assert running.restore(saved) == 70 + 12 - 1


def test_a_file_that_was_replaced_while_it_is_loaded_does_not_count(saved: Path) -> None:
    path = saved.parent / "llama.gguf"
    with load(path) as running:
        write_tiny(saved.parent / "seed.gguf", TinyLlama(context=2048, seed=5)).replace(path)
        assert running.restore(saved) == 70 + 12 - 1
    refused(load(path), saved, "another model file")


@pytest.mark.parametrize("types", CACHES[1:], ids="/".join)
def test_rows_of_other_cache_types_are_refused(saved: Path, types: tuple[str, str]) -> None:
    running = load(saved.parent / "llama.gguf", cache_type_k=types[0], cache_type_v=types[1])
    refused(running, saved, "another cache type")


def test_every_part_of_the_fingerprint_binds(saved: Path) -> None:
    with load(saved.parent / "llama.gguf") as running:
        own = running.call(lambda: fingerprint(running.model, running.cache.rows))
        assert all(isinstance(value, str) and value for value in own.values())
        for name in own:
            with pytest.raises(TsggError, match=f"another {name}: .* where it was saved, '.*x' here"):
                file.read(saved, own | {name: own[name] + "x"}, running.cache.rows, running.model.vocab_size, 1 << 20)


def test_what_changes_the_bits_of_a_cell_changes_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def own(**arguments: object) -> dict[str, str]:
        with load(path, **arguments) as running:
            return running.call(lambda: fingerprint(running.model, running.cache.rows))

    path = write_tiny(tmp_path / "q4_0.gguf", TinyLlama(weights="q4_0"))
    plain = own()
    assert own(n_threads=2, n_seq=2, n_ctx=256) == plain
    assert plain["choice of repacked weights"] != "none", "no repacked kernels here: no test of it"
    for change in ({"repack": False}, {"pair_rows": False}, {"attention": "flash"}):
        changed = dataclasses.replace(settings, **change)
        for module in ("tsgg.weights", "tsgg.fingerprint", "tsgg.memory.kv", "tsgg.forward"):
            monkeypatch.setattr(f"{module}.settings", changed)
        found = own()
        assert [name for name in plain if found[name] != plain[name]] in (
            ["choice of repacked weights"],
            ["TS_PAIR_ROWS"],
            ["cache layout"],
        )
        monkeypatch.undo()


def test_the_engines_own_thread_and_a_closed_engine_are_refused(saved: Path) -> None:
    with load(saved.parent / "llama.gguf") as running:
        for function in (running.save, running.restore):
            with pytest.raises(UsageError, match="own thread"):
                running.call(lambda function=function: function(saved))  # type: ignore[misc]
    for function in (running.save, running.restore):
        with pytest.raises(TsggError, match="closed"):
            function(saved)


def test_an_llm_saves_and_brings_back(tmp_path: Path) -> None:
    path, prompt = write_chat_model(tmp_path / "tiny.gguf"), "the hell " * 20
    with LLM(path, n_ctx=256) as llm:
        first = llm.generate(prompt, temperature=0, max_tokens=20)
        saved = llm.save_cache(tmp_path / "saved")
    with LLM(path, n_ctx=256) as llm:
        assert llm.restore_cache(str(tmp_path / "saved")) == saved
        again = llm.generate(prompt, temperature=0, max_tokens=20)
    assert again.tokens == first.tokens
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1 >= 32
