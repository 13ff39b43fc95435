"""What a real vLLM 0.32 has answered (record_vllm.py; a small Qwen3-VL of random weights, on a CPU), played back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_vllm import FRAME_SIZE, MODEL, key_of, recorded_clips
from servers import Reply, Scripted

from vlmrb.scoring.openai import OpenAIScorer
from vlmrb.scoring.scorer import ScorerError

FOLDER = Path(__file__).parent / "recorded"
QUICK = {"wait_s": 0.0, "deadline_s": 2.0, "timeout_s": 2.0}


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return json.loads((FOLDER / "vllm.json").read_text())


def playing(recorded: dict[str, Any], error: str = "") -> Callable[[str, bytes, Mapping[str, str]], Reply]:
    def script(path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        found = recorded["errors"][error] if error else recorded["exchanges"][key_of(body)]
        return found["status"], json.dumps(found["answer"]).encode()

    return script


def make(url: str) -> OpenAIScorer:
    return OpenAIScorer(f"{url}/v1", MODEL, tokenizer=str(FOLDER / "tokenizer"), frame_size=FRAME_SIZE, **QUICK)


def test_requests_are_those_that_the_real_server_has_answered_and_scores_those_of_transformers(recorded):
    with Scripted(playing(recorded)) as server:
        scorer = make(server.url)
        scorer.setup()
        assert list(scorer._answers.ids) == recorded["ids"]
        scores = scorer.score(recorded_clips())
    np.testing.assert_allclose(scores, recorded["scores"], atol=1e-7)
    np.testing.assert_allclose(scores, recorded["transformers"], atol=2e-6)  # two implementations in float32
    assert np.ptp(scores) > 0.2


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("no such model", "The model `org/Other` does not exist"),
        ("wrong key", r"refused the API key in \$OPENAI_API_KEY"),
        ("too many ids", "greater than max allowed: 128"),
    ],
)
def test_the_real_server_s_refusals_are_passed_on_in_one_line(recorded, error, reason):
    with Scripted(playing(recorded, error)) as server, pytest.raises(ScorerError, match=reason) as caught:
        make(server.url).setup()
    assert "\n" not in str(caught.value)
