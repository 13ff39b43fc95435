"""Rules: what files may hold, truth in product logic, and priorities, against computations by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tensordict import TensorDict
from toy_rules import toy

from vlmrb.cli import main
from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.prefill import prefill_with_buffer
from vlmrb.replay.rules.predicates import PredicateFamily, families, find_predicates, predicates_for, register
from vlmrb.replay.rules.schema import Rule, RuleSet, parse_rules, read_rules, write_rules
from vlmrb.replay.rules.term import RuleTerm
from vlmrb.replay.terms import TDTerm

RULES = RuleSet("toy", (Rule(("first", "not second"), "then", 0.9), Rule((), "acts", 0.3)))


def by_hand(s: NDArray, a: NDArray, s2: NDArray) -> list[float]:
    """Returns Σ c T / Σ c of `RULES`."""
    return [(0.9 * x[0] * (1 - x[1]) * y[0] + 0.3 * (action == 1)) / 1.2 for x, action, y in zip(s, a, s2, strict=True)]


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def entry(**changes: Any) -> dict[str, Any]:
    rule = {"body": ["first"], "head": "then", "confidence": 0.5} | changes
    return {"family": "toy", "rules": [{name: value for name, value in rule.items() if value is not None}]}


# Files


def test_files_come_back_as_they_were_written(tmp_path: Path) -> None:
    rules = RuleSet("toy", (Rule(("first", "not second"), "then", 0.25, 'so "they" say'), Rule((), "acts", 1.0)), "Ünd")
    write_rules(tmp_path / "rules.json", rules)
    assert read_rules(tmp_path / "rules.json") == rules
    write_rules(tmp_path / "bare.json", RULES)
    assert read_rules(tmp_path / "bare.json") == RULES


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "Expecting"),
        ("[]", "the file must be an object with family, rules"),
        ({"rules": []}, "the file lacks 'family'"),
        ({"family": "toy", "rules": []}, "expected 1 to 100 rules, got 0"),
        ({"family": "toy", "rules": {}}, '"rules" must be a list'),
        ({"family": 1, "rules": [entry()["rules"][0]]}, '"family" must be a name'),
        ({"family": "tox", "rules": [entry()["rules"][0]]}, "family 'tox' is unknown; there are: doorkey"),
        (entry(head=None), "rule 1 lacks 'head'"),
        (entry(weight=1), "rule 1 has 'weight', and knows only body, head, confidence, comment"),
        (entry(body="first"), 'rule 1: "body" must be a list of predicates'),
        (entry(body=[1]), 'rule 1: "body" must be a list of predicates'),
        (entry(head=["then"]), 'rule 1: "head" must be a predicate'),
        (entry(comment=1), 'rule 1: "comment" must be text'),
        (entry(confidence=True), 'rule 1: "confidence" must be a number'),
        (entry(confidence="1"), 'rule 1: "confidence" must be a number'),
        (entry(confidence=1.5), "rule 1 (first → then): confidence 1.5 must lie in [0, 1]"),
        (entry(confidence=math.nan), "confidence nan must lie in [0, 1]"),
        (entry(confidence=0), "every confidence is 0: the rules have no effect"),
        (
            entry(body=["frist"]),
            "unknown predicate 'frist', did you mean 'first'? family 'toy' has: acts, first, second",
        ),
        (entry(head="not not then"), "unknown predicate 'not then'"),
        (entry(head="__import__('os').abort()"), "unknown predicate"),
        (
            {
                "family": "toy",
                "rules": [*entry(body=["first", "acts"])["rules"], *entry(body=["acts", "first"])["rules"]],
            },
            "rule 2 (acts & first → then): says the same as rule 1",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_files_name(content: Any, says: str, tmp_path: Path) -> None:
    path = write(tmp_path / "rules.json", content)
    with pytest.raises(ValueError, match=r"rules .*rules\.json: ") as raised:
        read_rules(path)
    assert says in str(raised.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ValueError, match=r"rules none\.json cannot be read: No such file"):
        read_rules("none.json")


def test_the_digest_tells_what_priorities_depend_on() -> None:
    same = RuleSet("toy", (Rule((), "acts", 0.3, "a comment"), Rule(("not second", "first"), "then", 0.9)), "another")
    assert same.digest == RULES.digest
    others = [RULES.with_confidences([0.9, 0.31], ""), RuleSet("toy", RULES.rules[:1])]
    assert len({rules.digest for rules in (RULES, *others)}) == 3


# Predicates


@pytest.mark.parametrize(
    ("gives", "says"),
    [
        (lambda s, a, s2: s[:, 0] + 0.5, r"must give values in \[0, 1\], got 0.5 to 1.5"),
        (lambda s, a, s2: np.full(len(a), np.nan), r"must give values in \[0, 1\], got nan to nan"),
        (lambda s, a, s2: s, r"must give one value per row, \[2\], got \[2, 2\]"),
        (lambda s, a, s2: s[:, 2], r"failed: IndexError: index 2 is out of bounds"),
        (lambda s, a, s2: True, r"must give one value per row, \[2\], got \[\]"),
    ],
)
def test_a_predicate_that_breaks_its_contract_is_named(gives: Any, says: str) -> None:
    family = PredicateFamily("broken", "Broken", "")

    def odd(s: NDArray, a: NDArray, s2: NDArray) -> Any:
        """Something."""
        return gives(s, a, s2)

    family.predicate(odd)
    s = np.array([[0.0, 1.0], [1.0, 0.0]])
    with pytest.raises(ValueError, match=f"predicate 'odd' {says}"):
        family.truth("odd", s, np.array([0, 1]), s)


def test_predicates_need_a_name_of_their_own_and_say_what_they_mean() -> None:
    family = PredicateFamily("small", "Small", "")

    def silent(s: Any, a: Any, s2: Any) -> Any:
        return a

    with pytest.raises(ValueError, match="predicate 'silent' needs a docstring"):
        family.predicate(silent)
    with pytest.raises(ValueError, match="family 'toy' has a predicate 'first' already"):
        toy.predicate(toy.predicates["first"])
    with pytest.raises(ValueError, match="must be one word"):
        PredicateFamily("two words", "Small", "")
    with pytest.raises(ValueError, match="a built-in family is called 'doorkey'"):
        register(PredicateFamily("doorkey", "Small", ""))
    assert "small" not in families()


def test_families_are_found_by_name_module_and_environment() -> None:
    assert find_predicates("toy") is find_predicates("toy_rules:toy") is predicates_for("anywhere:Toy-v3") is toy
    assert predicates_for("MiniGrid-DoorKey-16x16-v0").name == "doorkey"
    for env_id in ("MiniGrid-DoorKey-6x8-v0", "MiniGrid-LavaCrossingS9N1-v0", "MyToy-v3"):
        with pytest.raises(ValueError, match="no predicates are known for it; there are families for doorkey"):
            predicates_for(env_id)
    with pytest.raises(ValueError, match="family 'no_module:toy': cannot import 'no_module'"):
        find_predicates("no_module:toy")


def test_meanings_are_the_first_paragraph_in_one_line() -> None:
    assert toy.meaning("second") == "The second number of s."
    assert toy.meaning("then") == "The first number of s', in two lines."


# Truth


UNIT = st.floats(0, 1)


@given(st.lists(st.tuples(UNIT, UNIT, st.integers(0, 2), UNIT), min_size=1, max_size=9))
def test_truth_is_the_product_of_body_and_head(rows: list[tuple[float, float, int, float]]) -> None:
    s = np.array([row[:2] for row in rows])
    a = np.array([row[2] for row in rows])
    s2 = np.array([[row[3], 0.0] for row in rows])
    assert RULES.weighted_truth(s, a, s2) == pytest.approx(by_hand(s, a, s2))
    body, whole = RULES.truths(s, a, s2)
    assert body[:, 0] == pytest.approx(s[:, 0] * (1 - s[:, 1]))
    assert (body[:, 1] == 1).all()
    assert (whole <= body).all()


def test_a_rule_whose_body_does_not_hold_is_not_true() -> None:
    s, s2 = np.array([[0.0, 0.0]]), np.array([[1.0, 0.0]])  # the implication would be
    assert RULES.truths(s, np.array([0]), s2)[1].tolist() == [[0.0, 0.0]]


# Priorities


def block(num_envs: int, length: int, seed: int = 0) -> TensorDict:
    """Makes rows ``[n, T]``; each environment's third step ends an episode."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.rand(num_envs, length + 1, 2, generator=generator, dtype=torch.float64)
    before, after = states[:, :-1].clone(), states[:, 1:].clone()
    done = torch.zeros(num_envs, length, 1, dtype=torch.bool)
    done[:, 2] = True
    action = torch.randint(0, 3, (num_envs, length), generator=generator)
    reward = torch.rand(num_envs, length, 1, generator=generator)
    following = {"observation": after, "reward": reward, "done": done, "terminated": done}
    return TensorDict({"observation": before, "action": action, "next": following}, [num_envs, length])


@pytest.mark.parametrize("eta", [0.5, 5.0])
def test_a_priority_is_the_errors_power_times_the_rules_factor(eta: float) -> None:
    buffer = VLMReplayBuffer(64, batch_size=4, terms=[TDTerm(0.6, 0.01), RuleTerm(RULES, eta)], lam=1.0)
    rows = block(2, 5)
    index = buffer.extend(rows)
    errors = np.linspace(0.1, 3, len(index))
    buffer.write_column("td_error", index, torch.zeros(len(index), dtype=torch.int64), errors, source="test")
    flat = rows.reshape(-1)
    truth = by_hand(*(flat[key].numpy() for key in ("observation", "action", ("next", "observation"))))
    expected = [(error + 0.01) ** 0.6 * math.exp(eta * value) for error, value in zip(errors, truth, strict=True)]
    assert buffer._sampler.priorities(len(index)) == pytest.approx(expected)
    assert buffer.columns["rule_truth"][: len(index)].tolist() == pytest.approx(truth)


@pytest.mark.parametrize("n_steps", [2, 3])
def test_with_n_step_returns_predicates_see_the_state_in_which_the_return_ends(n_steps: int) -> None:
    buffer = VLMReplayBuffer(64, batch_size=4, terms=[RuleTerm(RULES)], lam=1.0, n_steps=n_steps)
    rows = block(2, 5)
    parts = [rows[:, :2], rows[:, 2:]]
    index = [*buffer.extend(parts[0]).tolist(), *buffer.extend(parts[1]).tolist(), *buffer.end_streams().tolist()]
    stored = buffer._writer.table.first(len(index))
    for slot in index:
        s, a, s2 = (stored[key][slot].numpy() for key in ("observation", "action", ("next", "observation")))
        env, t = (int(value) for value in np.argwhere((rows["observation"].numpy() == s).all(-1))[0])
        last = min(t + n_steps - 1, 2 if t <= 2 else 4)
        assert (s2 == rows["next", "observation"][env, last].numpy()).all()
        assert buffer.columns["rule_truth"][slot] == pytest.approx(by_hand([s], [a], [s2])[0])
    assert len(index) == 10


def test_a_loaded_buffer_draws_as_the_saved_one_and_refuses_other_rules(tmp_path: Path) -> None:
    def make(rules: RuleSet, eta: float = 5.0) -> VLMReplayBuffer:
        return VLMReplayBuffer(12, batch_size=4, terms=[TDTerm(), RuleTerm(rules, eta)], lam=1.0, n_steps=2)

    one, other = make(RULES), make(RULES)
    rows = block(2, 10)
    for part in (rows[:, :5], rows[:, 5:]):  # 18 rows get stored, so the last ones take the place of the first
        one.extend(part)
        one.sample()
    torch.save(one.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for _ in range(3):
        assert torch.equal(one.sample()["index"], other.sample()["index"])
    assert torch.equal(one.columns["rule_truth"], other.columns["rule_truth"])
    for buffer in (make(RULES.with_confidences([0.9, 0.2], "")), make(RULES, eta=4.0)):
        with pytest.raises(ValueError, match=r"saved replay buffer has terms=.*RuleTerm\(eta=5.0, rules=toy/"):
            buffer.load_state_dict(one.state_dict())


def test_rows_of_an_earlier_run_get_their_truths() -> None:
    earlier = VLMReplayBuffer(64, batch_size=4, terms=[TDTerm()], lam=1.0, n_steps=2)
    ruled = VLMReplayBuffer(64, batch_size=4, terms=[TDTerm(), RuleTerm(RULES)], lam=1.0, n_steps=2)
    new = VLMReplayBuffer(64, batch_size=4, terms=[TDTerm(), RuleTerm(RULES)], lam=1.0, n_steps=2)
    for buffer in (earlier, ruled):
        buffer.extend(block(2, 5))
    prefill_with_buffer(new, earlier.state_dict())
    ruled.end_streams()
    assert torch.equal(new.columns["rule_truth"], ruled.columns["rule_truth"])
    assert new.columns["rule_truth"][:10].min() > 0


@pytest.mark.parametrize("eta", [0.0, -1.0, math.inf, math.nan])
def test_an_eta_without_effect_is_refused(eta: float) -> None:
    with pytest.raises(ValueError, match="the rules term's eta must be positive and finite"):
        RuleTerm(RULES, eta)


def test_rules_that_name_no_family_take_the_one_given() -> None:
    content = {"rules": entry()["rules"]}
    assert parse_rules(content, "toy").rules[0].confidence == 0.5
    with pytest.raises(ValueError, match="the file has 'family', and knows only rules, comment"):
        parse_rules(entry(), "toy")


def test_without_a_family_those_that_there_are_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", "predicates"]) == 0
    assert "doorkey  for env.id " in capsys.readouterr().out
