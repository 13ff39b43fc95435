"""The scorer for OpenAI-compatible servers, against a server that answers in the form that vLLM documents.

No vision-language model runs here: the stand-in decodes the images and derives log-probabilities from them, so that a
wrong image, order, question or token shows in the score.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import logging
import math
import pickle
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from odd_scorers import GreyRenderer
from PIL import Image
from servers import Reply, Scripted, free_port
from small_vlms import train_tokenizer

from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.openai import OpenAIScorer
from vlmrb.scoring.prompts import PROMPTS, Prompt
from vlmrb.scoring.scorer import ScorerError
from vlmrb.serving.client import RemoteError

QUICK = {"wait_s": 5.0, "deadline_s": 5.0, "timeout_s": 3.0, "backoff_s": 0.02, "breaker_s": 0.1}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer({}).save_pretrained(folder)
    return folder


def log_probabilities(frames: list[np.ndarray], question: str, ids: list[int]) -> list[float]:
    """Log-probabilities that depend on every pixel, on the order of frames, on the question and on the token."""
    digest = hashlib.blake2b(question.encode() + b"".join(frame.tobytes() for frame in frames), digest_size=4)
    rng = np.random.default_rng(int.from_bytes(digest.digest()))
    weights = rng.random(max(ids) + 1)[ids]
    return np.log(0.9 * weights / weights.sum()).tolist()


class VLLM:
    """Answers chat completions as vLLM's server does, or wrongly in one way (``fault``)."""

    def __init__(self, folder: Path, fault: str = "") -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.fault = fault
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()

    def __call__(self, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        request = json.loads(body)
        with self._lock:
            self.requests.append(request)
            self.keys.append(headers.get("Authorization"))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            time.sleep(0.02)
            return self._answer(path, request)
        finally:
            with self._lock:
                self.at_once -= 1

    def _answer(self, path: str, request: dict[str, Any]) -> Reply:
        if path != "/v1/chat/completions":
            return 404, b'{"detail":"Not Found"}'
        if request["model"] != "org/Small-VLM":
            return 404, json.dumps({"error": {"message": f"The model `{request['model']}` does not exist."}}).encode()
        *images, text = request["messages"][0]["content"]
        frames = [decode(part["image_url"]["url"]) for part in images]
        ids = request["logprob_token_ids"]
        logs = log_probabilities(frames, text["text"], ids)
        sampled = 3
        listed = [(sampled, -0.5), *zip(ids, logs, strict=True)]
        if self.fault == "ignores the ids":
            listed = []
        if self.fault == "drops an id":
            del listed[4]
        if self.fault == "rough numbers":
            listed = [(number, 0.5) for number, _ in listed]
        if self.fault == "not a number":
            listed = [(number, math.nan) for number, _ in listed]
        top = [{"token": self._token(number, request), "logprob": log, "bytes": None} for number, log in listed]
        first = {"token": self._token(sampled, request), "logprob": -0.5, "bytes": None, "top_logprobs": top}
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "?"},
            "logprobs": None if self.fault == "no logprobs" else {"content": [first]},
            "finish_reason": "length",
        }
        return 200, json.dumps({"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice]}).encode()

    def _token(self, number: int, request: dict[str, Any]) -> str:
        if request["return_tokens_as_token_ids"] and self.fault != "gives text":
            return f"token_id:{number}"
        return self.tokenizer.decode([number + (self.fault == "another tokenizer")])


def decode(url: str) -> np.ndarray:
    kind, _, data = url.partition(",")
    assert kind == "data:image/png;base64"
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert image.format == "PNG"
    return np.asarray(image)


class SizedRenderer(GreyRenderer):
    """Draws a snapshot as a square of the size asked for, in three shades."""

    def render(self, snapshots, frame_size=None):
        side = frame_size or 8
        shades = (snapshots[..., None, None, :3] * 20).astype(np.uint8)
        return np.broadcast_to(shades, (*snapshots.shape[:-1], side, side, 3))


def some_clips(count: int = 6, seed: int = 0) -> ClipBatch:
    rng = np.random.default_rng(seed)
    return ClipBatch(np.arange(count), rng.integers(0, 10, (count, 4, 3)), np.full(count, 4), SizedRenderer())


def make(url: str | list[str], tokenizer: Path, **options: Any) -> OpenAIScorer:
    urls = [f"{part}/v1" for part in ([url] if isinstance(url, str) else url)]
    settings = {"model": "org/Small-VLM", "tokenizer": str(tokenizer), "frame_size": 16, **QUICK, **options}
    return OpenAIScorer(urls, **settings)


def expected(clips: ClipBatch, scorer: OpenAIScorer) -> np.ndarray:
    """r by the paper's definition, from plain probabilities."""
    yes, no = scorer._answers.yes, scorer._answers.no
    scores = []
    for movie in clips.frames(scorer.frame_size):
        logs = log_probabilities(list(movie), scorer.question.text, [*yes, *no])
        chances = dict(zip([*yes, *no], np.exp(logs), strict=True))
        p_yes, p_no = (sum(chances[number] for number in side) for side in (yes, no))
        scores.append(p_yes / (p_yes + p_no))
    return np.array(scores)


def test_scores_are_the_paper_s_r_of_the_served_log_probabilities(tokenizer):
    with Scripted(VLLM(tokenizer)) as server:
        scorer = make(server.url, tokenizer)
        scorer.setup()
        clips = some_clips()
        scores = scorer.score(clips)
        assert scores.dtype == np.float32
        np.testing.assert_allclose(scores, expected(clips, scorer), atol=1e-6)
        assert np.ptp(scores) > 0.05


def test_the_request_is_the_one_that_vllm_answers_exactly(tokenizer):
    vllm = VLLM(tokenizer)
    with Scripted(vllm) as server:
        scorer = make(server.url, tokenizer, extra_body={"mm_processor_kwargs": {"vision_input_type": "vanilla"}})
        scorer.setup()
        scorer.score(some_clips(1))
    request = vllm.requests[-1]
    content = request.pop("messages")[0]["content"]
    assert [part["type"] for part in content] == ["image_url"] * 4 + ["text"]
    assert content[-1]["text"] == PROMPTS["grid"].text
    assert len(request["logprob_token_ids"]) == 12
    assert request == {
        "model": "org/Small-VLM",
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": True,
        "logprob_token_ids": list(scorer._answers.ids),
        "return_tokens_as_token_ids": True,
        "mm_processor_kwargs": {"vision_input_type": "vanilla"},
    }


def test_clips_that_look_alike_are_asked_about_once_and_several_at_a_time(tokenizer):
    vllm = VLLM(tokenizer)
    with Scripted(vllm) as server:
        scorer = make(server.url, tokenizer, concurrency=4)
        scorer.setup()
        asked = len(vllm.requests)
        clips = some_clips(24)
        twice = clips.select(np.concatenate([np.arange(24), np.arange(24)[::-1]]))
        scores = scorer.score(twice)
    assert len(vllm.requests) - asked == 24
    assert 1 < vllm.most_at_once <= 4
    np.testing.assert_array_equal(scores[:24], scores[24:][::-1])


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("ignores the ids", "does not know logprob_token_ids"),
        ("drops an id", r"leaves tokens \[\d+\] out"),
        ("gives text", "does not know logprob_token_ids"),
        ("another tokenizer", "another tokenizer than"),
    ],
)
def test_a_server_that_gives_other_tokens_than_asked_for_is_refused_at_the_start(tokenizer, fault, reason):
    with Scripted(VLLM(tokenizer, fault)) as server, pytest.raises(ScorerError, match=reason) as caught:
        make(server.url, tokenizer).setup()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fault", ["no logprobs", "rough numbers", "not a number"])
def test_a_server_without_log_probabilities_is_said_to_have_none(tokenizer, fault):
    with Scripted(VLLM(tokenizer, fault)) as server, pytest.raises(RemoteError, match="log-probabilities"):
        make(server.url, tokenizer).setup()


def test_a_model_that_is_not_served_is_named(tokenizer):
    with Scripted(VLLM(tokenizer)) as server, pytest.raises(ScorerError, match="`org/Other` does not exist"):
        make(server.url, tokenizer, model="org/Other").setup()


@pytest.mark.parametrize("fault", ["ignores the ids", "drops an id", "no logprobs", "not a number"])
def test_an_answer_that_lacks_something_in_the_middle_of_a_run_is_no_score(tokenizer, fault):
    vllm = VLLM(tokenizer)
    with Scripted(vllm) as server:
        scorer = make(server.url, tokenizer)
        scorer.setup()
        vllm.fault = fault
        with pytest.raises(RemoteError):
            scorer.score(some_clips(2))
        vllm.fault = ""
        clips = some_clips(2)
        np.testing.assert_allclose(scorer.score(clips), expected(clips, scorer), atol=1e-6)


def test_of_several_servers_each_is_checked_and_those_that_are_missing_are_named(tokenizer, caplog):
    missing = f"http://127.0.0.1:{free_port()}"
    with Scripted(VLLM(tokenizer)) as good, Scripted(VLLM(tokenizer, "another tokenizer")) as bad:
        with caplog.at_level(logging.WARNING):
            make([good.url, missing], tokenizer).setup()
        assert missing in caplog.text
        with pytest.raises(ScorerError, match=f"{bad.url}/v1 has another tokenizer"):
            make([good.url, bad.url], tokenizer).setup()


def test_a_missing_server_fails_setup_as_an_ordinary_error_so_that_it_is_tried_again(tokenizer):
    with pytest.raises(RemoteError, match="cannot be reached"):
        make(f"http://127.0.0.1:{free_port()}", tokenizer, wait_s=0.2).setup()


def test_the_key_comes_from_the_environment(tokenizer, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "secret")
    vllm = VLLM(tokenizer)
    with Scripted(vllm) as server:
        make(server.url, tokenizer, api_key_env="SOME_KEY").setup()
    assert set(vllm.keys) == {"Bearer secret"}


def test_little_mass_on_the_two_words_is_warned_of_once(tokenizer, caplog):
    class Unsure(VLLM):
        def _answer(self, path, request):
            status, content = super()._answer(path, request)
            found = json.loads(content)
            for entry in found["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
                entry["logprob"] -= 3
            return status, json.dumps(found).encode()

    with Scripted(Unsure(tokenizer)) as server, caplog.at_level(logging.WARNING):
        scorer = make(server.url, tokenizer)
        scorer.setup()
        clips = some_clips()
        np.testing.assert_allclose(scorer.score(clips), expected(clips, scorer), atol=1e-6)
        scorer.score(clips)
    assert [record.message for record in caplog.records if "0.045 of the probability" in record.message] != []
    assert caplog.text.count("of the probability") == 1
    assert scorer.stats()["mass"] == pytest.approx(0.9 * math.exp(-3), rel=1e-3)


def test_words_that_the_tokenizer_does_not_know_whole_are_refused(tokenizer):
    prompt = Prompt("Was the goal achieved? Answer affirmative or negative.", yes="affirmative", no="negative")
    with pytest.raises(ScorerError, match="no single tokens for 'affirmative' and 'negative'"):
        make("http://127.0.0.1:1", tokenizer, prompt=prompt).setup()


def test_a_tokenizer_that_cannot_be_had_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ScorerError, match=r"hf download org/none --include .*init_args.tokenizer"):
        make("http://127.0.0.1:1", Path("org/none")).setup()


def test_name_version_and_prompt_tell_scorers_apart(tokenizer):
    def key(**options: Any) -> tuple[str, str, str]:
        scorer = make("http://127.0.0.1:1", tokenizer, **options)
        return scorer.name, scorer.version, scorer.prompt

    keys = [
        key(),
        key(model="org/other"),
        key(revision="abc"),
        key(prompt="grid_terse"),
        key(extra_body={"mm_processor_kwargs": {"a": 1}}),
    ]
    assert len(set(keys)) == len(keys)
    assert key(wait_s=1.0, concurrency=2) == keys[0]
    assert keys[0][0] == "small-vlm"


def test_it_travels_to_a_process_of_its_own(tokenizer):
    with Scripted(VLLM(tokenizer)) as server:
        scorer = pickle.loads(pickle.dumps(make(server.url, tokenizer)))
        scorer.setup()
        assert scorer.score(some_clips(1)).shape == (1,)
        with contextlib.closing(scorer):
            assert scorer.stats()["requests"] > 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"concurrency": 0}, "concurrency=0"),
        ({"frame_size": 0}, "frame_size=0"),
        ({"deadline_s": 1.0}, "deadline_s=1.0 must be at least 3"),
        ({"prompt": "grod"}, "did you mean grid"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(tokenizer, options, reason):
    with pytest.raises(ValueError, match=reason):
        make("http://127.0.0.1:1", tokenizer, **options)
