"""The command line: answers on stdout, everything else on stderr, exit status 2 for what the user can mend."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.chat_models import write_chat_model
from tests.tiny_models import TinyLlama, write_tiny
from tsgg.cli import COMMANDS, main
from tsgg.model import Model
from tsgg.probe import RowExactness, probe_rows

PROMPT = "the hell the hell the hell the"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("cli") / "tiny.gguf", TinyLlama()))


def test_generate_prints_the_text_and_statistics_only_where_a_terminal_or_a_flag_asks_for_them(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "-m", model, "-p", PROMPT, "-n", "12", "--temp", "0"]) == 0
    out, err = capsys.readouterr()
    assert out.strip() and not err
    assert main(["generate", "-m", model, "-p", PROMPT, "-n", "12", "--temp", "0", "--stats"]) == 0
    again, err = capsys.readouterr()
    assert again == out
    for word in ("tok/s", "drafted", "accepted", "tokens per verify"):
        assert word in err


def test_generate_is_the_same_with_and_without_speculation(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for flag in ("--spec", "--no-spec"):
        assert main(["generate", "-m", model, "-p", PROMPT, "-n", "40", "--seed", "3", flag, "--no-stats"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_generate_json_is_one_object(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--json", "-m", model, "-p", PROMPT, "-n", "5", "--temp", "0", "--logprobs", "2"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["usage"]["completion_tokens"] == len(answer["tokens"]) == len(answer["logprobs"]) == 5
    assert answer["speculation"]["steps"] >= 1


def test_devices_and_inspect_tell_what_runs(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--json"]) == 0
    assert any(device["kind"] == "cpu" for device in json.loads(capsys.readouterr().out)["devices"])
    assert main(["inspect", "-m", model]) == 0
    out = capsys.readouterr().out
    for word in ("llama, 2 layers", "MiB", "gpt2", "none in the file", "suffix", "exact"):
        assert word in out


def test_chat_answers_once_with_a_prompt(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["chat", "-m", str(smollm2_path), "-c", "512", "-p", "Hi", "-n", "8", "--temp", "0"]
    assert main([*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["role"] == "assistant" and answer["generation"]["usage"]["completion_tokens"] <= 8


def test_the_second_turn_of_a_chat_computes_only_what_is_new(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = io.StringIO("Say: red green blue red green blue\nAgain, the same.\n")
    monkeypatch.setattr("sys.stdin", lines)
    assert main(["chat", "-m", str(smollm2_path), "-c", "512", "-n", "24", "--temp", "0", "--stats"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) >= 2
    first, second = (line for line in err.splitlines() if "cached" in line)
    assert "(0 cached" in first and "(0 cached" not in second


def test_inspect_json_gives_numbers_where_text_gives_sentences(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "-m", model, "--json", "-c", "256", "--check-head"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["architecture"] == {"name": "llama", "layers": 2, "embedding": 64}
    assert report["context"]["tokens"] == 256 and report["context"]["trained"] == 1024
    assert report["device"]["threads"] >= 1
    assert sum(report["weights"].values()) < Path(model).stat().st_size
    memory = report["memory"]
    assert memory["needed"] == sum(memory[part] for part in ("mapped", "copied", "cache", "scratch"))
    assert report["bytes"]["caches"] > 0 and report["bytes"]["resident"] > 0
    assert [size["tokens"] for size in report["cache"]] == [256, 32768] and report["cache"][0]["bytes"] > 0
    assert report["tokenizer"]["tokens"] == 264 and report["tokenizer"]["ends_at"]
    assert report["row_exactness"]["claimed"] is True and report["row_exactness"]["rows"]["8"] is True
    assert report["row_exactness"]["forward"]["difference"] == 0
    assert report["draft_heads"] == {"blocks": 0, "refusal": None} and report["head_check"] is None
    assert report["speculation"]["enabled"] is True


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        main([command, "--help"])
    assert status.value.code == 0
    assert "usage: tsgg" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "-m", "MODEL", "-p", "x", "--nope"], "--nope"),
        (["generate", "-m", "MODEL"], "-p TEXT"),
        (["generate", "-m", "missing.gguf", "-p", "x"], "missing.gguf"),
        (["generate", "-m", "MODEL", "-p", "x", "--spec-draft", "65"], "1 to 64"),
        (["generate", "-m", "MODEL", "-p", "x", "--spec-draft", "0"], "1 to 64"),
        (["generate", "-m", "MODEL", "-p", "x", "--spec-type", "magic"], "magic"),
        (["generate", "-m", "MODEL", "-p", "x", "--temp", "-3"], "temperature"),
        (["generate", "-m", "MODEL", "-p", "x", "-c", "0"], "n_ctx"),
        (["generate", "-m", "MODEL", "-p", "x", "--device", "Abacus"], "Abacus"),
        (["generate", "-m", "MODEL", "-p", "x", "--draft-model", "absent.gguf"], "absent.gguf"),
        (
            ["generate", "-m", "MODEL", "-p", "x", "--spec-type", "ngram", "--draft-model", "d.gguf"],
            "no drafter weights",
        ),
        (["generate", "-m", "MODEL", "-p", "x", "--mtp-spec"], "use --spec"),
        (["generate", "-m", "MODEL", "-p", "x", "--mtp-draft=3"], "use --spec-draft"),
        (["generate", "-m", "MODEL", "-p", "x", "--spec-draft-model", "y"], "use --draft-model"),
        (["chat", "-m", "MODEL", "-p", "x"], "chat template"),
        (["fly"], "fly"),
        ([], "COMMAND"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_status_2(
    arguments: list[str], words: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([model if word == "MODEL" else word for word in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("tsgg: ") and words in err


def test_the_environment_sets_defaults_and_a_misspelt_variable_is_an_error(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from tsgg import llm, settings

    with_draft = replace(settings.settings, spec={"TS_SPEC_DRAFT": "3"})
    monkeypatch.setattr(llm, "settings", with_draft)
    assert main(["inspect", "-m", model]) == 0
    assert "up to 3 tokens" in capsys.readouterr().out
    monkeypatch.setattr(llm, "settings", replace(settings.settings, spec={"TS_SPEC_DRAFTS": "3"}))
    assert main(["inspect", "-m", model]) == 2
    assert "TS_SPEC_DRAFTS" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value"), [("TS_REPACK", "7"), ("TS_GRAPH_BUDGET_MB", "many"), ("TS_CPU", "zen9")])
def test_a_wrong_environment_variable_is_one_line(name: str, value: str) -> None:
    command = [sys.executable, "-m", "tsgg", "devices"]
    done = subprocess.run(command, env={**os.environ, name: value}, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"tsgg: {name} is {value!r}, ") and done.stderr.count("\n") == 1


def test_inspect_computes_on_the_engines_thread_which_owns_the_model(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def probe(model: Model) -> RowExactness:
        threads.append(threading.current_thread().name)
        return probe_rows(model)

    monkeypatch.setattr("tsgg.cli.inspect.probe_rows", probe)
    assert main(["inspect", "-m", model, "--json"]) == 0
    assert threads == ["tsgg-engine"]


def test_what_no_flag_says_of_sampling_is_what_the_file_recommends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_chat_model(tmp_path / "greedy.gguf", general__sampling__temp=0.0))
    for command in ("generate", "chat"):
        answers = []
        for flags in ([], ["--temp", "0"], ["--temp", "5", "--seed", "3"]):
            assert main([command, "--json", "-m", path, "-p", PROMPT, "-n", "20", "--ignore-eos", *flags]) == 0
            answer = json.loads(capsys.readouterr().out)
            answers.append(answer.get("generation", answer)["tokens"])
        assert answers[0] == answers[1] != answers[2]
