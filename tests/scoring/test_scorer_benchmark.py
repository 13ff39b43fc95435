"""The scorer's benchmark runs, and the shapes it ships are the published ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize(("shape", "millions"), [("plm_1b", 1533.5), ("plm_3b", 3516.8)])
def test_the_shapes_have_as_many_weights_as_the_real_models(shape, millions):
    from transformers import PerceptionLMConfig, PerceptionLMForConditionalGeneration

    settings = json.loads((BENCHMARKS / "shapes" / f"{shape}.json").read_text())
    with torch.device("meta"):
        model = PerceptionLMForConditionalGeneration(PerceptionLMConfig(**settings, image_token_id=5, video_token_id=6))
    assert sum(weight.numel() for weight in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)


@pytest.fixture
def small_shape(tmp_path) -> Path:
    settings = json.loads((BENCHMARKS / "shapes" / "plm_1b.json").read_text())
    settings["text_config"] |= {
        "vocab_size": 600,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    settings["vision_config"]["model_args"] |= {
        "img_size": [56, 56],
        "embed_dim": 64,
        "depth": 2,
        "num_heads": 4,
        "ref_feat_shape": [4, 4],
    }
    file = tmp_path / "small.json"
    file.write_text(json.dumps(settings))
    return file


@pytest.mark.slow
def test_both_sides_give_the_same_scores_and_frames_are_saved(small_shape, tmp_path):
    sizes = ["--clips=16", "--naive_clips=4", "--noise_clips=4", "--pairs=1", "--dtype=float32", "--device=cpu"]
    models = ["--models", "perception_lm", "--random_weights", str(small_shape)]
    result = tmp_path / "result.json"
    command = [sys.executable, "scorer.py", *models, *sizes, "--json", str(result)]
    subprocess.run(command, cwd=BENCHMARKS, check=True, capture_output=True)
    found = json.loads(result.read_text())
    assert found["headline"]["unit"] == "×"
    assert [row["clips"] for row in found["rows"]] == [16, 4, 16, 4]
    for stream, noise in (found["rows"][:2], found["rows"][2:]):
        assert float(stream["max |Δr|"]) < 1e-5
        assert stream["frame hits"] > 0.5
        assert (noise["frame hits"], noise["different frames"]) == (0.0, 1.0)
