"""Flags: llama.cpp's habits are understood, a slip is answered with what may have been meant, and a value is only a value."""

from __future__ import annotations

import argparse
import io
import logging
from pathlib import Path

import pytest

from tests.tiny_models import TinyLlama, metadata, tensors, write_gguf, write_tiny
from tsgg import LLM
from tsgg.cli import main
from tsgg.cli.arguments import add_model, add_sampling, sampling
from tsgg.cli.parser import Parser
from tsgg.cli.texts import read_prompt, unescape
from tsgg.errors import UsageError
from tsgg.platform import usable_cores
from tsgg.sampling import SamplingParams

PROMPT = "the hell the hell the"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("flags") / "tiny.gguf", TinyLlama()))


def parse(*words: str) -> argparse.Namespace:
    """Parsed like the words behind a command."""
    parser = Parser(prog="tsgg")
    command = parser.add_subparsers(dest="command", required=True).add_parser("generate")
    add_model(command)
    add_sampling(command)
    return parser.parse(["generate", *words])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-s", "7"], SamplingParams(seed=7)),
        (["-s", "-1"], SamplingParams()),
        (["--predict", "5"], SamplingParams(max_tokens=5)),
        (["--n-predict", "5"], SamplingParams(max_tokens=5)),
        (["-n", "-1"], SamplingParams()),
        (["-n", "-2"], SamplingParams()),
        (
            ["--repeat-penalty", "1.5", "--repeat-last-n", "-1"],
            SamplingParams(repetition_penalty=1.5, penalty_last_n=-1),
        ),
        (["--stop", r"\n"], SamplingParams(stop=r"\n")),
        (["-e", "--stop", r"\n", "--stop", "b"], SamplingParams(stop=("\n", "b"))),
        (["-e", "--no-escape", "--stop", r"\n"], None),
    ],
)
def test_llama_cpps_sampling_flags_mean_what_they_mean_there(words: list[str], expected: SamplingParams | None) -> None:
    if expected is None:
        with pytest.raises(UsageError, match="not allowed with"):
            parse(*words)
    else:
        assert SamplingParams.parse(sampling(parse(*words))) == expected


@pytest.mark.parametrize("number", [0, -3])
def test_no_other_negative_number_of_tokens_is_taken(number: int) -> None:
    with pytest.raises(UsageError, match="max_tokens"):
        sampling(parse("-n", str(number)))


def test_llama_cpps_model_flags_mean_what_they_mean_there() -> None:
    parsed = parse("-hf", "u/r:Q4_0", "--ctx-size", "77", "-ctk", "q8_0", "-ctv", "f32", "-ngl", "99", "-n", "3")
    assert (parsed.model, parsed.n_ctx, parsed.gpu_layers, parsed.max_tokens) == ("u/r:Q4_0", 77, "99", 3)
    assert (parsed.cache_type_k, parsed.cache_type_v) == ("q8_0", "f32")


def test_ngl_is_taken_with_one_sentence(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = ["generate", "-m", model, "-p", PROMPT, "-n", "3"]
    assert main([*answer, "-ngl", "99"]) == 0
    err = capsys.readouterr().err
    assert "n_gpu_layers=99" in err and err.count("\n") == 1
    assert main([*answer, "-ngl", "0"]) == 0
    assert not capsys.readouterr().err  # the CPU, as it says
    assert main([*answer, "-ngl", "many"]) == 2
    assert "expected a number of layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["generate", "--promt", "x"], "did you mean '--prompt'?"),
        (["generate", "--spec-drft=3"], "did you mean '--spec-draft'?"),
        (["generate", "--max-token", "3"], "did you mean '--max-tokens'?"),  # and no abbreviation of it
        (["chat", "--sistem", "x"], "did you mean '--system'?"),
        (["generat"], "did you mean 'generate'?"),
        (["generate", "--zzzzzz"], "unknown argument --zzzzzz (see"),
        (["generate", "stray"], "unknown argument stray (see"),
    ],
)
def test_a_slip_is_answered_with_what_may_have_been_meant(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert meant in capsys.readouterr().err


def test_a_removed_flag_is_no_flag_where_it_stands_as_a_value(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["generate", "-m", model, "--prompt=--mtp-spec", "-n", "3"]) == 0
    assert main(["generate", "-m", model, "-p", "--mtp-spec is no more", "-n", "3"]) == 0
    capsys.readouterr()
    assert main(["generate", "-m", model, "-p", "--mtp-spec", "-n", "3"]) == 2
    assert "--FLAG=-VALUE" in capsys.readouterr().err  # how such a value is given


def test_verbose_stands_before_or_after_the_command(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["-v", "generate"], ["generate", "-v"]):
        assert main([*words, "-m", model, "-p", PROMPT, "-n", "3"]) == 0
        assert "tsgg.model: " in capsys.readouterr().err
    assert main(["generate", "-m", model, "-p", PROMPT, "-n", "3"]) == 0
    assert not capsys.readouterr().err
    assert logging.getLogger("tsgg").level == logging.NOTSET  # nothing is left of it


def test_log_probabilities_are_a_line_per_token(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["generate", "-m", model, "-p", PROMPT, "-n", "4", "--temp", "0", "--ignore-eos", "--logprobs", "2"]) == 0
    )
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    value, token, first, first_value = lines[0].split()[:4]
    assert (value, token) == (first_value, first)  # greedy: the token is the most probable one
    assert float(value) < 0 and len(lines[0].split()) == 6


# -- texts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a\n", "a"),
        (b"a\r\n", "a"),
        (b"a\n\n", "a\n"),
        (b"a", "a"),
        (b"\n", ""),
        ("ö\n".encode(), "ö"),
        (b"a\r\nb", "a\nb"),
    ],
)
def test_one_line_break_at_the_end_of_a_file_or_of_standard_input_is_no_part_of_the_prompt(
    data: bytes, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(data)
    assert read_prompt(None, str(path)) == text
    for words in (("-", None), (None, "-")):
        monkeypatch.setattr(
            "sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii")
        )  # what it names is no matter
        assert read_prompt(*words) == text


def test_the_answer_does_not_depend_on_where_the_prompt_comes_from(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(f"{PROMPT}\n", encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    texts = set()
    for source in (["-p", PROMPT], ["-f", str(path)], ["-p", "-"]):
        assert main(["generate", *source, "-m", model, "-n", "6", "--temp", "0"]) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1


def test_bytes_that_are_not_utf_8_are_refused_in_one_line_wherever_they_come_from(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"ab\xff")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding="utf-8"))
    for words in (["-f", str(path)], ["-p", "-"], ["-p", "ab\udcff"], ["-p", "a", "--stop", "\udcff"]):
        assert main(["generate", "-m", model, *words]) == 2
        err = capsys.readouterr().err
        assert "not UTF-8" in err and err.count("\n") == 1
    assert main(["generate", "-m", model, "-f", str(tmp_path / "absent")]) == 2
    assert capsys.readouterr().err == f"tsgg: prompt file {tmp_path / 'absent'}: No such file or directory\n"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (r"a\nb\tc\rd", "a\nb\tc\rd"),
        (r"\\n", r"\n"),
        (r"\"\'", "\"'"),
        (r"\x41\u00e9", "Aé"),
        (r"\xc3\xa9", "é"),  # bytes, as in llama.cpp
        (r"\q \ é", r"\q \ é"),
        ("\\", "\\"),
    ],
)
def test_escapes_become_what_they_mean(given: str, meant: str) -> None:
    assert unescape(given) == meant


@pytest.mark.parametrize("given", [r"\xff", r"\ud800"])
def test_escapes_that_are_no_text_are_refused(given: str) -> None:
    with pytest.raises(UsageError, match="do not give UTF-8"):
        unescape(given)


# -- what cannot be had -------------------------------------------------------------------------------------------------


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    caplog.clear()
    return found


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-t", str(usable_cores() + 1)], "usable cores"),
        (["-c", "1100"], "trained on 1024"),
        (["--spec-type", "draft-head"], "needs drafter weights"),
    ],
)
def test_what_cannot_be_had_or_does_harm_is_warned_of_once(
    flags: list[str], words: str, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["generate", "-m", model, "-p", PROMPT, "-n", "3", *flags]) == 0
    (warning,) = warnings(caplog)
    assert words in warning


def test_what_can_be_had_is_not_warned_of(model: str, caplog: pytest.LogCaptureFixture) -> None:
    for flags in (["-t", "1", "-c", "1024"], ["--spec-type", "ngram"], ["--no-spec", "--spec-draft", "3"], []):
        assert main(["generate", "-m", model, "-p", PROMPT, "-n", "3", *flags]) == 0
    assert not warnings(caplog)


def test_a_template_that_ignores_thinking_or_tools_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for source, heeds in (("{{ messages[0].content }}", False), ("{{ tools }}{{ enable_thinking }}", True)):
        values = metadata(TinyLlama()) | {"tokenizer.chat_template": source}
        path = write_gguf(tmp_path / f"{heeds}.gguf", values, list(tensors(TinyLlama())))
        with LLM(path) as llm:
            for _ in range(2):
                messages = [{"role": "user", "content": "hi"}]
                llm.chat(messages, max_tokens=1, enable_thinking=True, tools=[{"name": "f"}])
            llm.chat(messages, max_tokens=1, tools=[])
        found = warnings(caplog)
        assert [("thinking" in text, "tools" in text) for text in found] == (
            [] if heeds else [(True, False), (False, True)]
        )


def test_a_drafter_that_cannot_be_had_is_warned_of_when_it_is_asked_for(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(model) as llm:
        assert not warnings(caplog)
        llm.update_speculation("draft-head")
        assert "needs drafter weights" in warnings(caplog)[0]
