"""`python -m benchmarks steps`: its parts of a step add up, on a tiny model and with whatever times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from tests.tiny_models import write_tiny
from tsgg.ggml.devices import Backend


@pytest.mark.parametrize("drafter", ["off", "ngram"])
def test_the_parts_of_a_step_are_reported_for_every_number_of_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], drafter: str
) -> None:
    path, compute = write_tiny(tmp_path / "tiny.gguf"), Backend.compute
    arguments = [
        "steps",
        "--model",
        str(path),
        "--requests",
        "3,1",
        "--tokens",
        "14",
        "--rounds",
        "2",
        "--threads",
        "1",
    ]
    assert main([*arguments, "--drafter", drafter, "--force"]) == 0
    assert Backend.compute is compute, "nothing is timed any more"
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(report["requests"]) == ["1", "3"] and report["drafter"] == drafter
    for row in report["requests"].values():
        assert row["steps"] >= 10
        assert 0 < row["engine_us"] <= row["python_us"] <= 1e3 * row["step_ms"]
        assert row["engine_us_p10"] <= row["engine_us"] and row["python_us_p10"] <= row["python_us"]
    rows = report["requests"]
    assert report["further_engine_us"] == pytest.approx((rows["3"]["engine_us"] - rows["1"]["engine_us"]) / 2)
