"""What HFScorer refuses, and in which words; what it does when a model, its tokenizer or the memory falls short."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from doorkey_clips import make_clips
from small_vlms import FRAME_PIXELS, build_small_vlm, train_tokenizer

from vlmrb.envs.tiles import GridRenderer
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.config import ScoringConfig
from vlmrb.scoring.hf import HFScorer
from vlmrb.scoring.process import ProcessBackend
from vlmrb.scoring.prompts import PROMPTS, Prompt
from vlmrb.scoring.scorer import ScorerError
from vlmrb.settings import load_scoring

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return build_small_vlm("perception_lm", tmp_path_factory.mktemp("perception_lm"))


@pytest.fixture(scope="module")
def llava(tmp_path_factory) -> Path:
    return build_small_vlm("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def clips() -> ClipBatch:
    return make_clips(8, 8, GridRenderer(8, 8), env_steps=30, instances=2, seed=1).select(np.arange(6))


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def ready(folder: Path, **settings) -> HFScorer:
    scorer = HFScorer(str(folder), **settings)
    scorer.setup()
    return scorer


def refusal(folder: Path | str, **settings) -> str:
    with pytest.raises(ScorerError) as caught:
        HFScorer(str(folder), **settings).setup()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_it_travels_before_setup_and_is_light():
    scorer = pickle.loads(pickle.dumps(HFScorer("facebook/Perception-LM-1B", prompt="grid_terse")))
    assert scorer.name == "perception-lm-1b"
    assert "facebook/Perception-LM-1B@main" in scorer.version
    assert PROMPTS["grid_terse"].text in scorer.prompt


def test_constructing_it_imports_nothing_heavy():
    code = "import sys; from vlmrb.scoring.hf import HFScorer; HFScorer('org/name'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_version_tells_models_and_settings_apart(folder, copy):
    base = HFScorer(str(folder))
    assert HFScorer(str(copy)).version == base.version  # the same weights elsewhere
    for changed in ({"dtype": "float32"}, {"fps": 2.0}, {"video": False}, {"attn_implementation": "eager"}):
        assert HFScorer(str(folder), **changed).version != base.version
    assert HFScorer("org/name", revision="abc").version != HFScorer("org/name").version
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    assert HFScorer(str(copy)).version != base.version


def test_a_revision_of_a_folder_is_refused(folder):
    with pytest.raises(ValueError, match="revision='abc' goes with an id on the hub"):
        HFScorer(str(folder), revision="abc")


def test_large_weights_are_told_apart_by_samples(tmp_path):
    from vlmrb.scoring.vlm.loading import fingerprint

    content = np.random.default_rng(0).bytes(20 << 20)
    (tmp_path / "model.safetensors").write_bytes(content)
    before = fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(bytes(byte ^ 1 for byte in content))
    assert fingerprint(tmp_path) != before


def test_it_knows_the_memory_of_weights_that_are_here(folder):
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert HFScorer(str(folder), cache_mb=3).memory_bytes == 4 * count + (3 << 20)
    assert HFScorer(str(folder), cache_mb=0, dtype="bfloat16").memory_bytes == 2 * count
    assert HFScorer("org/name").memory_bytes is None


def test_the_prompt_is_part_of_what_tells_scores_apart(folder):
    texts = {
        HFScorer(str(folder), prompt=prompt).prompt for prompt in ("grid", "grid_terse", "All done? Say yes or no.")
    }
    assert len(texts) == 3


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"frame_size": 0}, "frame_size=0"),
        ({"batch_clips": 0}, "batch_clips=0"),
        ({"cache_mb": -1}, "cache_mb=-1"),
        ({"fps": 0.0}, "fps=0.0"),
        ({"fps": float("inf")}, "fps=inf"),
        ({"dtype": "bf16"}, "dtype='bf16' must be one of auto, float32, bfloat16"),
        ({"video": "maybe"}, "video='maybe'"),
        ({"fast": "maybe"}, "fast='maybe'"),
        ({"prompt": "grit"}, "did you mean grid"),
        ({"prompt": "Is the door open?"}, "never says 'yes'"),
    ],
)
def test_bad_settings_are_named(settings, named):
    with pytest.raises(ValueError, match=named):
        HFScorer("org/name", **settings)


@pytest.mark.parametrize("name", ["plm1b", "plm3b", "plm8b", "gemma4_e4b", "qwen3vl_2b", "smolvlm2"])
def test_a_configuration_of_a_real_model_is_read(name):
    scoring = load_scoring([ROOT / "configs" / "scorer" / f"{name}.yaml"])
    assert isinstance(scoring.scorer, HFScorer)
    assert scoring.scorer.dtype == "bfloat16"
    assert scoring.scorer.question == PROMPTS["grid"]


@pytest.mark.parametrize(
    ("written", "asked"),
    [
        ("'Done? yes or no'", ("Done? yes or no", "yes", "no")),
        # quoted, since YAML takes a bare yes and no for true and false
        ("{text: 'Fertig? ja oder nein', 'yes': ja, 'no': nein}", ("Fertig? ja oder nein", "ja", "nein")),
    ],
)
def test_a_question_of_ones_own_fits_into_yaml(tmp_path, written, asked):
    overlay = tmp_path / "mine.yaml"
    arguments = f"{{model: org/name, prompt: {written}}}"
    overlay.write_text(f"scoring: {{scorer: {{class_path: vlmrb.scoring.hf.HFScorer, init_args: {arguments}}}}}")
    scorer = load_scoring([overlay]).scorer
    assert isinstance(scorer, HFScorer)
    assert (scorer.question.text, scorer.question.yes, scorer.question.no) == asked


def test_an_empty_model_is_not_the_present_folder():
    with pytest.raises(ValueError, match="model is empty"):
        HFScorer("")


def test_a_path_that_leads_nowhere_is_refused_at_once():
    with pytest.raises(ValueError, match="is no folder"):
        HFScorer("./no/such/model")


def test_an_unknown_model_without_network_says_how_to_fetch_it(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refusal("some-org/some-model", revision="v2")
    assert "hf download some-org/some-model --revision v2" in message
    assert "scorer.init_args.model" in message


def test_a_model_in_the_hubs_cache_needs_no_network(folder, tmp_path, monkeypatch, clips):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some-org--some-model"
    shutil.copytree(folder, repository / "snapshots" / "abc123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    scorer = HFScorer("some-org/some-model")
    scorer.setup()
    np.testing.assert_array_equal(scorer.score(clips), ready(folder).score(clips))
    assert "attention" in refusal("some-org/some-model", attn_implementation="no_such_attention")


@pytest.mark.slow
@pytest.mark.parametrize("package", ["transformers", "timm"])
def test_a_missing_package_says_what_to_install(folder, package):
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        f"from vlmrb.scoring.hf import HFScorer; HFScorer({str(folder)!r}).setup()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert "ScorerError" in last
    assert package in last
    assert "pip install 'vlmrb[vlm]'" in last


def test_a_folder_without_a_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert str(tmp_path) in refusal(tmp_path)


def test_a_text_model_is_refused(copy):
    (copy / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert str(copy) in refusal(copy)


def test_a_damaged_weight_file_is_refused(copy):
    (copy / "model.safetensors").write_bytes(b"nothing")
    assert str(copy) in refusal(copy)


def test_a_header_of_weights_that_is_no_table_is_refused_when_they_are_loaded(copy):
    (copy / "model.safetensors").write_bytes((9).to_bytes(8, "little") + b"[1, 2, 3]")
    assert str(copy) in refusal(copy)


def test_a_model_that_lacks_weights_is_refused_as_it_would_answer_at_random(copy):
    from safetensors.torch import load_file, save_file

    weights = load_file(copy / "model.safetensors")
    lost = next(name for name in weights if "layers.0" in name)
    del weights[lost]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    message = refusal(copy)
    assert "lacks 1 of its weights" in message
    assert lost.rpartition("layers.0")[2] in message


def test_folders_and_broken_links_beside_a_model_do_not_matter(folder, copy):
    (copy / "logs.json").mkdir()
    (copy / "gone.json").symlink_to(copy / "nothing")
    assert HFScorer(str(copy)).version == HFScorer(str(folder)).version


def test_a_missing_attention_package_names_the_setting(folder):
    assert "attn_implementation" in refusal(folder, attn_implementation="flash_attention_2")


def test_a_scorer_that_could_not_be_set_up_can_be_closed(llava):
    scorer = HFScorer(str(llava), fast=True)
    with pytest.raises(ScorerError):
        scorer.setup()
    scorer.close()


def test_a_model_without_a_chat_template_is_refused(copy):
    (copy / "chat_template.jinja").unlink()
    assert "chat template" in refusal(copy)


def test_a_chat_template_that_shows_nothing_is_refused(copy):
    (copy / "chat_template.jinja").write_text("{{ messages[0]['content'][-1]['text'] }}")
    assert "neither videos nor images" in refusal(copy)


def test_a_chat_template_without_videos_makes_it_show_images(copy, clips):
    template = copy / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|video|>", ""))
    assert "takes no videos" in refusal(copy, video=True)
    assert ready(copy).score(clips).std() > 0


def test_a_tokenizer_without_a_yes_token_is_refused(copy):
    words = [" no", "no", "No", " No", "NO", " NO"]
    named = {"image_token": "<|image|>", "video_token": "<|video|>"}
    train_tokenizer(named, words).save_pretrained(copy)
    assert "no single tokens for 'yes' and 'no'" in refusal(copy)


def test_other_words_can_be_asked_for(copy, clips):
    words = ["ja", " ja", "nein", " nein"]
    train_tokenizer({"image_token": "<|image|>", "video_token": "<|video|>"}, words).save_pretrained(copy)
    scorer = ready(copy, prompt=Prompt("Ist das Ziel erreicht? Antworte mit ja oder nein.", yes="ja", no="nein"))
    assert scorer._answers.spellings == (("ja", "nein"), (" ja", " nein"))
    assert scorer.score(clips).std() > 0
    assert "ja/nein" in scorer.prompt


def test_yes_and_no_are_not_mixed_up(folder, clips):
    asked = Prompt("Is the goal reached? yes or no", name="one", version="1")
    swapped = Prompt("Is the goal reached? yes or no", name="two", version="1", yes="no", no="yes")
    scores = ready(folder, prompt=asked).score(clips)
    np.testing.assert_allclose(ready(folder, prompt=swapped).score(clips), 1 - scores, atol=1e-6)
    assert np.abs(scores - 0.5).min() > 1e-3


def test_a_processor_without_videos_shows_images_or_is_refused(llava, clips, caplog):
    assert "takes no videos" in refusal(llava, video=True)
    assert "fast=true" in refusal(llava, fast=True)
    with caplog.at_level(logging.INFO):
        scorer = ready(llava)
    assert scorer.frame_size == FRAME_PIXELS
    assert any("plain path" in record.message for record in caplog.records)
    together = scorer.score(clips)
    alone = np.concatenate([scorer.score(clips.select(np.array([i]))) for i in range(len(clips))])
    assert together.std() > 1e-4
    np.testing.assert_allclose(together, alone, atol=1e-6)
    assert "frame_hits" not in scorer.stats()


def test_frames_larger_than_what_the_model_sees_are_pointed_out(folder, caplog):
    ready(folder, frame_size=512)
    assert any("shrinks every frame to 64" in record.message for record in caplog.records)


def test_a_processor_that_cannot_take_the_frames_says_what_to_change(tmp_path):
    folder = build_small_vlm("qwen3_vl", tmp_path)
    scorer = ready(folder)
    thin = np.zeros((1, 8, 4, 1200, 3), np.uint8)  # an aspect ratio of 300, where 200 is the limit
    with pytest.raises(ScorerError, match=r"4×1200 pixels .* change scorer.init_args.frame_size"):
        scorer._plain._chat.inputs(thin)


def test_clips_without_a_renderer_are_refused(folder, clips):
    scorer = ready(folder)
    with pytest.raises(ValueError, match="no renderer"):
        scorer.score(ClipBatch(clips.clip_ids, clips.snapshots, clips.lengths))


def test_a_fast_path_that_has_gone_astray_is_left_at_the_first_clip(folder, clips, monkeypatch, caplog):
    import vlmrb.scoring.vlm.paths as paths

    right = ready(folder, fast=False).score(clips)
    own = paths.encoder_pixels

    def inverted(*args):
        return {name: -3 * value for name, value in own(*args).items()}

    monkeypatch.setattr(paths, "encoder_pixels", inverted)
    scorer = ready(folder)
    np.testing.assert_allclose(scorer.score(clips), right, atol=1e-6)
    assert any("plain path" in record.message for record in caplog.records)
    assert np.abs(ready(folder, fast=True).score(clips) - right).max() > 0.02  # it would have mattered


TOO_MUCH = """
import logging, resource, sys
from pathlib import Path
sys.path[:0] = {paths!r}
import numpy as np
import torch
from doorkey_clips import make_clips
from vlmrb.envs.tiles import GridRenderer
from vlmrb.scoring.hf import HFScorer

logging.basicConfig(level=logging.WARNING)
torch.set_num_threads(1)
torch.backends.mkldnn.set_flags(False)  # it reports a lack of memory in words of its own
clips, short = (make_clips(8, frames, GridRenderer(8, 8), env_steps=200, instances=4) for frames in ({frames}, 2))
scorer = HFScorer({folder!r}, frame_size=64, batch_clips=16, fast=False)
scorer.setup()
first = scorer.score({before})
used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + ({room} << 20),) * 2)
scores = scorer.score(clips.select(np.arange({clips})))
print(scorer.stats()["batch_halvings"], abs(scores[0] - first[0]) < 1e-6, scores.std() > 0)
"""


def limited(folder: Path, **settings) -> subprocess.CompletedProcess[str]:
    code = TOO_MUCH.format(paths=[str(Path(__file__).parent)], folder=str(folder), **settings)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_halved_and_said_once(folder):
    done = limited(folder, before="clips.select(np.arange(1))", room=24, frames=32, clips=16)
    assert done.returncode == 0, done.stderr
    halvings, *right = done.stdout.split()
    assert float(halvings) >= 1
    assert right == ["True", "True"]
    assert done.stderr.count("out of memory with 16 clips at once") == 1


@pytest.mark.slow
def test_a_single_clip_that_does_not_fit_says_what_to_change(folder):
    done = limited(folder, before="short.select(np.arange(1))", room=12, frames=512, clips=1)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("MemoryError: a single clip (512 frames of 64×64 pixels) does not fit")
    assert "frame_size" in last


@pytest.mark.slow
def test_it_scores_in_a_process_of_its_own_and_reports(folder, clips):
    backend = ProcessBackend(HFScorer(str(folder)), clips.renderer, ScoringConfig())
    try:
        wait(lambda: backend.collect() or backend.accepting)
        assert backend.accepting
        backend.submit(0, clips)
        (answer,) = wait(backend.collect)
    finally:
        backend.close()
    np.testing.assert_allclose(answer.scores, ready(folder, fast=False).score(clips), atol=1e-6)


def wait(condition, seconds: float = 120.0):
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return found
