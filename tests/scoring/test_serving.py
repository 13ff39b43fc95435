"""The parts of the scoring server that need no server to run."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from odd_scorers import FrameScorer, GoodScorer, GreyRenderer, WrongScorer, expected_scores
from servers import free_port

from vlmrb.cli import main
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.openai import OpenAIScorer
from vlmrb.scoring.remote import RemoteScorer
from vlmrb.scoring.scorer import ScorerError
from vlmrb.serving.batching import score_requests
from vlmrb.serving.metrics import Metrics
from vlmrb.serving.serve import serve
from vlmrb.serving.wire import Identity, pack, unpack

SPRITES = Path(__file__).parent.parent.parent / "configs" / "scorer" / "sprites.yaml"


def sent_clips(count: int, length: int = 4, seed: int = 0, needs: str = "frames", states: int = 9) -> ClipBatch:
    """Returns clips as they arrive at a server."""
    rng = np.random.default_rng(seed)
    clips = ClipBatch(
        np.arange(count), rng.integers(0, states, (count, length, 3)), np.full(count, length), GreyRenderer()
    )
    return unpack(pack(clips, Identity("grey", "1", "", needs, None)), 1 << 24)[1]


class PickyScorer(FrameScorer):
    """Raises if a clip is darker than allowed; notes how many clips it was shown at a time."""

    def __init__(self, darkest: float = 0.0) -> None:
        super().__init__()
        self.darkest = darkest
        self.shown: list[int] = []

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        self.shown.append(len(clips))
        scores = super().score(clips)
        if (scores < self.darkest).any():
            raise RuntimeError("too dark")
        return scores


def test_requests_share_batches_and_each_gets_its_own_scores():
    requests = [sent_clips(count, seed=seed) for seed, count in enumerate((3, 5, 4))]
    scorer = PickyScorer()
    together = score_requests(scorer, requests, batch_clips=8)
    assert scorer.shown == [8, 4]
    for clips, scores in zip(requests, together, strict=True):
        np.testing.assert_array_equal(scores, FrameScorer().score(clips))


def test_requests_of_snapshots_share_batches_too():
    requests = [sent_clips(count, seed=seed, needs="snapshots") for seed, count in enumerate((3, 5))]
    scorer = GoodScorer()
    for clips, scores in zip(requests, score_requests(scorer, requests, batch_clips=100), strict=True):
        np.testing.assert_array_equal(scores, expected_scores(clips.snapshots))
    assert len(scorer.seen) == 1


def test_clips_of_different_lengths_are_scored_apart_and_answered_in_order():
    requests = [sent_clips(2, length, seed=length) for length in (4, 6, 4, 5)]
    scorer = PickyScorer()
    answers = score_requests(scorer, requests, batch_clips=16)
    assert sorted(scorer.shown) == [2, 2, 4]
    for clips, scores in zip(requests, answers, strict=True):
        np.testing.assert_array_equal(scores, FrameScorer().score(clips))


def test_one_bad_request_spoils_no_other():
    bright, dark = sent_clips(3, seed=1), sent_clips(3, states=1)
    first, second, third = score_requests(PickyScorer(darkest=0.001), [bright, dark, bright], batch_clips=16)
    np.testing.assert_array_equal(first, FrameScorer().score(bright))
    np.testing.assert_array_equal(third, first)
    assert isinstance(second, RuntimeError)


@pytest.mark.parametrize("kind", ["nan", "shape", "range", "text"])
def test_a_scorer_that_breaks_its_contract_is_told_from_scores(kind):
    (found,) = score_requests(WrongScorer(kind), [sent_clips(2)], batch_clips=16)
    assert isinstance(found, ScorerError)


def test_no_requests_no_answers():
    assert score_requests(GoodScorer(), [], batch_clips=16) == []


def test_metrics_count_what_was_scored_and_what_was_not():
    metrics = Metrics()
    metrics.answered(200, clips=16, size=1000, seconds=0.02)
    metrics.answered(200, clips=4, size=500, seconds=200.0)
    metrics.answered(500, clips=7, size=100, seconds=0.5)
    lines = metrics.text(workers=2, ready=1).splitlines()
    for line in (
        'vlmrb_requests_total{status="200"} 2',
        'vlmrb_requests_total{status="500"} 1',
        "vlmrb_errors_total 1",
        "vlmrb_clips_total 20",
        "vlmrb_received_bytes_total 1600",
        "vlmrb_workers_ready 1",
        'vlmrb_request_seconds_bucket{le="0.01"} 0',
        'vlmrb_request_seconds_bucket{le="0.03"} 1',
        'vlmrb_request_seconds_bucket{le="100"} 2',
        'vlmrb_request_seconds_bucket{le="+Inf"} 3',
        "vlmrb_request_seconds_sum 200.520000",
    ):
        assert line in lines, line


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"host": "0.0.0.0"}, r"open to other machines: set a key first .export VLMRB_API_KEY"),
        ({"host": "::", "api_key_env": "OTHER_KEY"}, "export OTHER_KEY"),
        ({"host": "example.org"}, "must be one of 127.0.0.1"),
        ({"port": 80}, "port=80"),
        ({"accelerator": "tpu"}, "accelerator=tpu"),
        ({"devices": "all"}, "devices=all"),
        ({"devices": 0}, "devices=0 must be at least 1"),
        ({"devices": []}, r"devices=\[\] must be"),
        ({"devices": [0, -1]}, r"devices=\[0, -1\] must be"),
        ({"workers_per_device": 0}, "workers_per_device=0"),
        ({"max_request_mb": 0}, "max_request_mb=0"),
        ({"timeout_s": float("nan")}, "timeout_s=nan"),
        ({"batch_wait_ms": -1}, "batch_wait_ms=-1"),
        ({"tls_cert": "some.pem"}, "go together"),
        ({"tls_cert": str(SPRITES), "tls_key": str(SPRITES)}, "are no certificate"),
        ({"configs": ["missing.yaml"]}, "missing.yaml is no file"),
    ],
)
def test_what_cannot_work_or_is_not_safe_is_refused_by_name(options, reason, monkeypatch):
    monkeypatch.delenv("VLMRB_API_KEY", raising=False)
    with pytest.raises(ValueError, match=reason):
        serve(**{"configs": [str(SPRITES)], **options})


def test_a_port_in_use_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"port={port} cannot be had on 127.0.0.1"):
            serve([str(SPRITES)], port=port)


def test_a_server_without_a_device_ends_with_the_reason(capfd, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert main(["serve", "-c", str(SPRITES), "--port", str(free_port()), "--accelerator", "cuda"]) == 1
    assert "accelerator=cuda with devices=auto finds no device" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("module", "use", "command"),
    [
        ("vlmrb.serving.serve", lambda: serve([str(SPRITES)]), "pip install 'vlmrb[server]'"),
        ("vlmrb.scoring.remote", lambda: RemoteScorer("http://a"), "pip install 'vlmrb[remote]'"),
        ("vlmrb.scoring.openai", lambda: OpenAIScorer("http://a/v1", "org/model"), "pip install 'vlmrb[remote]'"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(module, use, command, monkeypatch):
    monkeypatch.setattr(f"{module}.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape(command)):
        use()


def test_the_verb_takes_several_configurations(capsys):
    assert main(["serve", "-c", str(SPRITES), "-c", "nowhere.yaml"]) == 1
    assert capsys.readouterr().err == "vlmrb serve: error: nowhere.yaml is no file\n"
