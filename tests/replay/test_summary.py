"""Schemes in words, and settings that do nothing within a budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser

from vlmrb.replay.config import ReplayConfig
from vlmrb.replay.summary import formula, idle_settings

OVERLAYS = Path(__file__).parents[2] / "configs" / "replay"
TERMS = {"td", "vlm", "credit", "age", "rank", "relo", "rules", "ero", "aer", "her", "score_reward"}
SCHEME = TERMS | {"lam_max", "warmup_fraction", "stratified", "importance_weights"}

FORMULAS = {
    "uniform": "uniform",
    "per": "λ 1, p = (|δ| + 1e-06)^0.6, importance weights β 0.4 → 1",
    "per_rank": "λ 1, p = rank(|δ|)^−0.7, stratified, importance weights β 0.5 → 1",
    "aer": "uniform, the most similar of 4 candidates each (AER)",
    "ero": "λ 1, p = mask (ERO)",
    "relo": "λ 1, p = (relu(L − L_target) + 1e-06)^0.6, importance weights β 0.4 → 1",
    "freshness": "λ 1, p = (|δ| + 1e-06)^0.6 · exp(−age / 2,500), importance weights β 0.4 → 1",
    "rules": "λ 1, p = (|δ| + 1e-06)^0.6 · exp(5 · rules), importance weights β 0.4 → 1",
    "her": "uniform, 80% relabelled (future, HER)",
    "vlm": "λ 0 → 0.5, p = 1[r > 0.5]",
    "vlm_td": "λ 0 → 0.5, p = 1[r > 0.5] · |δ|",
    "vlm_raw": "λ 0 → 0.5, p = r",
    "vlm_reward": "uniform, reward + 0.1 · 1[r > 0.5] (terminal)",
}


def read(name: str) -> ReplayConfig:
    parser = ArgumentParser()
    parser.add_argument("--replay", type=ReplayConfig, default=ReplayConfig(capacity=10_000))
    content = yaml.safe_load((OVERLAYS / f"{name}.yaml").read_text())["replay"]
    return parser.instantiate_classes(parser.parse_object({"replay": content})).replay


def test_every_overlay_is_listed() -> None:
    assert set(FORMULAS) == {path.stem for path in OVERLAYS.glob("*.yaml")}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_scheme_in_one_line(name: str) -> None:
    assert formula(read(name)) == FORMULAS[name]


@pytest.mark.parametrize("name", FORMULAS)
def test_an_overlay_says_all_that_makes_a_scheme_so_that_nothing_of_an_earlier_one_stays(name: str) -> None:
    content = yaml.safe_load((OVERLAYS / f"{name}.yaml").read_text())
    assert content["replay"].keys() >= SCHEME
    if not read(name).needs_scores:
        assert content["replay"]["clip_length"] is None
        assert content["scoring"]["scorer"] is None


@pytest.mark.parametrize(("name", "word"), [("ero", "first mask"), ("freshness", "fade"), ("per_rank", "ranks")])
def test_shares_of_the_capacity_that_lie_beyond_the_budget_are_remarked_on(name: str, word: str) -> None:
    scheme = read(name)
    (remark,) = idle_settings(scheme, 90)
    assert word in remark
    assert "lower replay.capacity=10,000" in remark
    assert list(idle_settings(scheme, 10_000)) == []
