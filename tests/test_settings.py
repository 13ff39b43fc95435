"""Single sections of configurations, as verbs without a training run read them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from vlmrb.callbacks.scoring import ScoringCallback
from vlmrb.scoring.section import ScoringSection
from vlmrb.scoring.sprites import SpritesScorer
from vlmrb.settings import load_scoring, read_yaml, refuse_moved

SCORERS = Path(__file__).parent.parent / "configs" / "scorer"


def test_the_light_section_takes_the_settings_of_the_whole_one():
    light, whole = (inspect.signature(kind).parameters for kind in (ScoringSection, ScoringCallback))
    assert light == whole


def test_later_files_go_over_earlier_ones(tmp_path):
    (tmp_path / "more.yaml").write_text("scoring: {cache: scores, batch_clips: 7}")
    scoring = load_scoring([SCORERS / "sprites.yaml", tmp_path / "more.yaml"])
    assert (type(scoring.scorer), scoring.cache, scoring.config.batch_clips) == (SpritesScorer, "scores", 7)


def test_reading_a_scorer_leaves_torch_out():
    code = f"import sys; from vlmrb.settings import load_scoring; load_scoring(['{SCORERS / 'sprites.yaml'}']); "
    code += "print([name for name in ('torch', 'lightning') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_section_without_a_scorer_says_so(tmp_path):
    config = tmp_path / "some.yaml"
    config.write_text("scoring: {backend: thread}")
    with pytest.raises(ValueError, match=r"some.yaml: scoring.scorer is not set"):
        load_scoring([config])


def test_a_prompts_words_without_quotes_are_refused_with_the_way_to_write_them(tmp_path):
    config = tmp_path / "prompt.yaml"
    config.write_text("scoring: {scorer: {init_args: {prompt: {text: Done yes or no, yes: yes, no: no}}}}")
    with pytest.raises(ValueError, match=r"prompt\.yaml: YAML reads a bare yes or no .* put the words in quotes"):
        read_yaml(config)
    config.write_text('scoring: {scorer: {init_args: {prompt: {text: Done yes or no, "yes": "yes", "no": "no"}}}}')
    assert read_yaml(config)["scoring"]["scorer"]["init_args"]["prompt"]["no"] == "no"


def test_a_setting_that_has_moved_is_refused_with_its_new_name() -> None:
    refuse_moved({"training.gamma", "replay.capacity"}, "old.yaml")
    with pytest.raises(
        ValueError, match=r"^old.yaml is of .*: training.epsilon_end is now model.init_args.epsilon_end$"
    ):
        refuse_moved({"training.gamma", "training.epsilon_end"}, "old.yaml")
