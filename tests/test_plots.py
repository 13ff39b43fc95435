from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.stats import t

from vlmrb.plots import (
    OTHERS,
    SCHEMES,
    confidence_band,
    plot_learning_curves,
    scheme_styles,
    short_number,
    student_t,
)


@pytest.mark.parametrize("degrees", [1, 2, 4, 9, 30, 31, 60, 500])
def test_t_factor_is_students(degrees: int) -> None:
    assert student_t(degrees) == pytest.approx(t.ppf(0.975, degrees), rel=2e-3)


def test_band_of_three_seeds_is_that_of_the_textbook() -> None:
    # values 1, 2, 3: mean 2, standard deviation 1, half-width 4.3027 · 1 / √3
    steps, mean, half = confidence_band([([0, 10], [0, 1]), ([0, 10], [0, 2]), ([0, 10], [0, 3])])
    assert steps.tolist() == [0, 10]
    assert mean.tolist() == [0, 2]
    assert half.tolist() == pytest.approx([0, 4.3027 / np.sqrt(3)], rel=1e-4)


def test_band_covers_the_true_mean_nineteen_times_in_twenty() -> None:
    values = np.random.default_rng(0).normal(0.3, 0.2, (4000, 5))
    _, mean, half = confidence_band([(np.arange(4000), column) for column in values.T])
    assert (np.abs(mean - 0.3) <= half).mean() == pytest.approx(0.95, abs=0.012)


def test_curves_at_different_steps_are_interpolated_where_all_are_known() -> None:
    steps, mean, _ = confidence_band([([0, 10, 20], [0, 1, 2]), ([5, 15], [1.5, 2.5])])
    assert steps.tolist() == [5, 10, 15]
    assert mean.tolist() == [1.0, 1.5, 2.0]


def test_single_curve_has_no_band() -> None:
    assert np.isnan(confidence_band([([0, 1], [0.0, 1.0])])[2]).all()


@pytest.mark.parametrize(
    ("curves", "message"),
    [
        ([], "no curves"),
        ([([], [])], "increasing"),
        ([([0, 0], [1, 1])], "increasing"),
        ([([0, 1], [1])], "as many values"),
        ([([0, 1], [0, 0]), ([2, 3], [0, 0])], "share no range"),
    ],
)
def test_curves_that_cannot_be_averaged_are_refused(curves: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        confidence_band(curves)


def test_a_scheme_looks_the_same_in_whatever_order_and_company() -> None:
    kinds = {"vlm": "vlm", "tiny": "vlm", "aer": "aer", "uniform": "uniform", "own": "vlm_td"}
    styles = scheme_styles(kinds)
    assert scheme_styles(dict(reversed(kinds.items()))) == styles
    assert len(set(styles.values())) == len(kinds)
    assert {label: styles[label] for label in ("vlm", "uniform")} == {
        label: SCHEMES[label] for label in ("vlm", "uniform")
    }
    assert styles["own"] == SCHEMES["vlm_td"]  # the only one of its kind
    assert [styles[label].light for label in ("aer", "tiny")] == [light for light, _ in OTHERS[:2]]
    many = scheme_styles({f"s{number}": "" for number in range(16)})
    assert len(set(many.values())) == 16


def test_plot_draws_each_label_in_its_color(tmp_path: Path) -> None:
    steps = np.arange(0, 50_001, 10_000)
    curves = {
        "uniform": [(steps, np.linspace(0, 0.4 + 0.1 * seed, 6)) for seed in range(3)],
        "VLM-RB": [(steps, np.linspace(0, 1, 6))],
    }
    plot_learning_curves(curves, tmp_path / "plots" / "curve.png", title="DoorKey-6×6")
    pixels = np.asarray(Image.open(tmp_path / "plots" / "curve.png").convert("RGB")).reshape(-1, 3).astype(int)
    for color in ((0x6E, 0x77, 0x81), (0xD5, 0x5E, 0x00)):
        assert (np.abs(pixels - color).max(1) < 8).sum() > 300


def test_plot_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no curves"):
        plot_learning_curves({}, tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()


@pytest.mark.parametrize(
    ("seeds", "words"),
    [
        ([5, 5], "mean of 5 seeds; band: 95 % interval of the mean (Student's t)"),
        ([3, 5], "mean of 3 to 5 seeds"),
        ([1, 1], "one run each"),
    ],
)
def test_picture_says_what_line_and_band_are(tmp_path: Path, seeds: list[int], words: str) -> None:
    curves = {str(number): [([0, 10], [0.0, 1.0])] * count for number, count in enumerate(seeds)}
    plot_learning_curves(curves, tmp_path / "curve.svg", title="World-v0")
    picture = (tmp_path / "curve.svg").read_text()  # text is drawn as outlines, with what it says in a comment
    assert words in picture
    assert "World-v0" in picture


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (950, "950"), (114_000, "114K"), (1_160_000, "1.16M")])
def test_numbers_are_shortened(value: float, text: str) -> None:
    assert short_number(value) == text
