"""Fitted confidences against closed forms, and the support test on rules that are right, wrong or rare."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import toy_rules  # noqa: F401  (registers the family)
from numpy.typing import NDArray

from vlmrb.cli import main
from vlmrb.replay.prefill import write_episode
from vlmrb.replay.rules.fit import Evidence, fit_confidences, gather_evidence, returns_to_go
from vlmrb.replay.rules.schema import Rule, RuleSet, read_rules, write_rules


def evidence(body: list[NDArray], head: list[NDArray], returns: NDArray, episodes: int) -> Evidence:
    bodies = np.stack(body, axis=1).astype(np.float64)
    whole = bodies * np.stack(head, axis=1)
    return Evidence(bodies, whole, returns.astype(np.float64), np.repeat(np.arange(episodes), len(returns) // episodes))


def test_returns_to_go_by_hand() -> None:
    assert returns_to_go(np.array([1.0, 0.0, 4.0]), 0.5).tolist() == [2.0, 2.0, 4.0]


@pytest.mark.parametrize("elsewhere", [0.2, 0.9])
def test_one_rule_is_fitted_to_what_its_head_adds(elsewhere: float) -> None:
    # Where the body holds y has the mean 0.36, with the head as well 0.84: 1 − c = 0.16 / 0.64. What y is elsewhere
    # does not matter.
    kinds = np.tile([0, 0, 0, 0, 1, 1, 2, 2], 50)
    body, head = kinds > 0, kinds == 2
    returns = np.choose(kinds, [elsewhere, 0.36, 0.84])
    returns[4], returns[12] = 0.0, 0.72  # the scale, with the same mean
    returns[6], returns[14] = 1.0, 0.68
    (found,) = fit_confidences(evidence([body], [head], returns, 50), [0.5])
    assert (found.status, found.episodes) == ("fitted", 50)
    assert found.confidence == pytest.approx(1 - 0.16 / 0.64, abs=1e-4)
    assert found.gain == pytest.approx(0.84 - 0.36)
    assert found.p == pytest.approx(1 / 2001)


def test_two_rules_share_what_they_explain_together() -> None:
    rng = np.random.default_rng(0)
    one, two = rng.random((2, 20_000)) < 0.4
    always = np.ones(20_000, np.bool_)
    y = 1 - 0.9 * (1 - 0.5 * one) * (1 - 0.3 * two)
    y[:2] = 0.0, 1.0
    found = fit_confidences(evidence([always, always], [one, two], y, 100), [0.9, 0.9])
    assert [finding.confidence for finding in found] == pytest.approx([0.5, 0.3], abs=2e-3)


def test_a_rule_gets_no_credit_for_the_situation_in_which_it_applies() -> None:
    # Late in an episode returns are high and the wrong head is seen only there, where it makes things worse.
    rng = np.random.default_rng(1)
    late = np.tile(np.arange(20) >= 10, 40)
    wrong = late & (rng.random(800) < 0.5)
    right = ~late & (rng.random(800) < 0.5)
    returns = 0.1 + 0.6 * late - 0.1 * wrong + 0.05 * right + 0.01 * rng.random(800)
    found = fit_confidences(evidence([late, ~late], [wrong, right], returns, 40), [0.9, 0.1])
    assert np.mean(returns[wrong]) > np.mean(returns[~wrong]) + 0.1
    assert [finding.status for finding in found] == ["rejected", "fitted"]
    assert found[0].confidence == 0.0
    assert found[0].gain == pytest.approx(-0.1, abs=0.01)
    assert found[0].p == 1.0
    assert found[1].confidence == pytest.approx(0.05 / 0.64 / (1 - 0.005 / 0.64), rel=0.2)  # of what is left to 1


def test_chance_is_not_support_even_where_rows_are_many() -> None:
    # One of two episodes is lucky throughout; a head that is seen in the lucky ones a little more often by chance has
    # thousands of rows on its side and a handful of episodes.
    episodes, length = 12, 500
    lucky = np.repeat(np.arange(episodes) % 2 == 0, length)
    share = np.repeat([0.5, 0.45, 0.5, 0.55, 0.45, 0.5, 0.55, 0.45, 0.5, 0.5, 0.5, 0.5], length)
    head = np.random.default_rng(2).random(episodes * length) < share
    found = fit_confidences(evidence([np.ones(len(head))], [head], lucky.astype(float), episodes), [0.7], level=0.01)
    assert found[0].status == "rejected"


def test_a_rule_that_is_seen_too_rarely_keeps_its_confidence() -> None:
    always = np.ones(200, np.bool_)
    rare = np.arange(200) < 30  # in three of twenty episodes
    common = np.arange(200) % 2 == 0
    returns = np.where(common, 1.0, 0.0)
    rules = evidence([always, always, rare], [rare, common, always], returns, 20)
    found = fit_confidences(rules, [0.7, 0.5, 0.6], min_episodes=4)
    assert [finding.status for finding in found] == ["kept", "fitted", "kept"]
    assert [finding.episodes for finding in found] == [3, 20, 3]
    assert (found[0].confidence, found[2].confidence) == (0.7, 0.6)
    assert np.isnan(found[0].p)
    assert np.isnan(found[2].gain)  # its body is never seen without its head


def test_equal_returns_say_nothing() -> None:
    with pytest.raises(ValueError, match="all 20 transitions have the return 0, so nothing tells rules apart"):
        fit_confidences(evidence([np.ones(20)], [np.arange(20) % 2], np.zeros(20), 2), [0.5])


# Recorded episodes

RULES = RuleSet("toy", (Rule(("first",), "then", 0.5), Rule((), "acts", 0.5), Rule((), "not acts", 0.5)))


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Makes episodes in which action 1 is rewarded at once, and nothing else is."""
    folder = tmp_path / "episodes"
    folder.mkdir()
    rng = np.random.default_rng(4)
    for number in range(30):
        length = 5 + number % 4
        action = rng.integers(0, 2, length)
        write_episode(
            folder / f"episode-{number:05d}.npz",
            observation=rng.random((length + 1, 2)).astype(np.float32),
            snapshot=np.zeros((length + 1, 1), np.uint8),
            action=action,
            reward=action.astype(np.float32),
            success=np.zeros(length, np.bool_),
            terminated=True,
        )
    return folder


@pytest.mark.parametrize("n_steps", [1, 3])
def test_evidence_is_of_the_rows_that_a_buffer_would_make(n_steps: int, recorded: Path) -> None:
    files = sorted(recorded.iterdir())
    found = gather_evidence(RULES, files, 0.9, n_steps)
    row = 0
    for number, file in enumerate(files):
        with np.load(file) as arrays:
            states, reward = arrays["observation"].astype(np.float64), arrays["reward"].astype(np.float64)
        for t in range(len(reward)):
            after = states[min(t + n_steps, len(reward))]
            assert found.body[row] == pytest.approx([states[t, 0], 1, 1])
            assert found.whole[row] == pytest.approx([states[t, 0] * after[0], reward[t], 1 - reward[t]])
            assert found.returns[row] == pytest.approx(sum(0.9**k * r for k, r in enumerate(reward[t:])))
            assert found.episode[row] == number
            row += 1
    assert row == len(found.returns)


def test_the_command_writes_what_it_found(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rules(tmp_path / "rules.json", RULES)
    (tmp_path / "run.yaml").write_text("training: {gamma: 0.5}\nreplay: {n_steps: 2}\n")
    command = ["rules", "fit", "-c", str(tmp_path / "run.yaml"), "--rules", str(tmp_path / "rules.json")]
    command += ["--episodes", str(recorded), "--out", str(tmp_path / "fitted.json")]
    assert main(command) == 0
    table = capsys.readouterr().out
    fitted = read_rules(tmp_path / "fitted.json")
    assert [(rule.body, rule.head) for rule in fitted.rules] == [(rule.body, rule.head) for rule in RULES.rules]
    assert fitted.comment == "Confidences fitted to 30 episodes: gamma 0.5, n_steps 2."
    assert fitted.rules[1].confidence > 0.5
    assert fitted.rules[2].confidence == 0.0
    assert "fitted" in table.splitlines()[2]
    assert "rejected" in table.splitlines()[3]
    assert main(command) == 1
    assert "fitted.json exists already: name another file" in capsys.readouterr().err


def test_what_cannot_be_fitted_ends_in_one_line(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(rules: RuleSet, episodes: Path, *more: str) -> str:
        (tmp_path / "rules.json").unlink(missing_ok=True)
        write_rules(tmp_path / "rules.json", rules)
        command = ["rules", "fit", "--rules", str(tmp_path / "rules.json"), "--episodes", str(episodes)]
        assert main([*command, "--out", str(tmp_path / "fitted.json"), *more]) != 0
        assert not (tmp_path / "fitted.json").exists()
        return capsys.readouterr().err.strip().splitlines()[-1]

    assert "support none of the rules" in failing(RuleSet("toy", RULES.rules[2:]), recorded)
    assert "holds no recorded episodes: make some with vlmrb record" in failing(RULES, tmp_path)
    assert "must lie in [0, 1]" in failing(RULES, recorded, "--level", "2")
    doorkey = RuleSet("doorkey", (Rule((), "picks_up", 1.0),))
    assert "episode-00000.npz: the predicates of doorkey read symbolic grids" in failing(doorkey, recorded)
    assert "there is no folder" in failing(RULES, recorded, "--out", str(tmp_path / "no" / "fitted.json"))
