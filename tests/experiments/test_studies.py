"""The studies that come along can be run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from vlmrb.early import require_sound
from vlmrb.experiments.soundness import budgets
from vlmrb.experiments.study import Study, read_study

ROOT = Path(__file__).parents[2]
STUDIES = sorted((ROOT / "studies").glob("*.yaml"))


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def one_seed(path: Path) -> Study:
    return read_study(path.relative_to(ROOT), seeds="0")


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_its_settings_are_sound(path: Path) -> None:
    for cell in one_seed(path).cells():
        require_sound(cell.arguments)


@pytest.mark.slow
def test_fit_would_take_them() -> None:
    """Each scheme with the first configuration, each configuration with the first scheme: overlays touch no others."""
    cells = [
        replace(cell, scheme=replace(cell.scheme, label=f"{path.stem}/{cell.label}"))  # told apart by study
        for path in STUDIES
        for study in [one_seed(path)]
        for cell in study.cells()
        if cell.config == study.configs[0] or cell.label == study.schemes[0].label
    ]
    found = budgets(cells)
    assert len(found) == len(cells)
    assert {steps for (_, label), steps in found.items() if label.startswith("paper")} == {1_000_000}


def test_the_papers_set_is_twelve_pairs_of_three_schemes_and_five_seeds() -> None:
    studies = [read_study(ROOT / "studies" / f"paper_{name}.yaml") for name in ("doorkey", "scene")]
    assert sum(len(study.configs) for study in studies) == 12
    assert [[scheme.label for scheme in study.schemes] for study in studies] == [
        ["uniform", "per", "vlm"],
        ["uniform", "per", "vlm_td"],
    ]
    assert sum(len(study.cells()) for study in studies) == 12 * 3 * 5


def test_schemes_of_the_small_comparison_are_those_that_have_an_overlay() -> None:
    elsewhere = {"vlm_raw", "vlm_reward", "her"}  # in small_factors; a reward, and goals: not on these tasks
    overlays = {path.stem for path in (ROOT / "configs" / "replay").glob("*.yaml")} - elsewhere
    labels = {scheme.label for scheme in one_seed(ROOT / "studies" / "small_schemes.yaml").schemes}
    assert labels == overlays | {"shuffled"}
