"""Rules proposed by a language model: what it is asked, what is made of its answer, on a local HTTP server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.scoring.servers import Reply, Scripted

from vlmrb.cli import main
from vlmrb.replay.rules.doorkey import FAMILY
from vlmrb.replay.rules.propose import make_prompt, read_answer
from vlmrb.replay.rules.schema import read_rules

RULES = [
    {"body": ["not carries_key"], "head": "picks_up", "confidence": 0.8, "comment": "first the key"},
    {"body": ["carries_key", "door_in_front"], "head": "opens_door", "confidence": 1},
]


def completion(text: Any, **choice: Any) -> bytes:
    message = {"role": "assistant", "content": text}
    return json.dumps({"choices": [{"message": message, "finish_reason": "stop"} | choice]}).encode()


def answer(rules: Any = RULES) -> str:
    return json.dumps({"rules": rules})


class Model:
    """Answers each request with the next of some texts, and keeps what it was asked."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    def __call__(self, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        self.asked.append(json.loads(body))
        self.keys.append(headers.get("Authorization"))
        return (200, self.answers.pop(0)) if path == "/v1/chat/completions" else (404, b"no")


def propose(model: Model, folder: Path, *more: str, env_id: str = "MiniGrid-DoorKey-6x6-v0") -> int:
    config = folder / "env.yaml"
    config.write_text(f"env: {{id: '{env_id}'}}\n")
    with Scripted(model) as server:
        command = ["rules", "propose", "-c", str(config), "--url", f"{server.url}/v1", "--model", "some/model"]
        return main([*command, "--out", str(folder / "rules.json"), "--timeout_s", "5", *more])


@pytest.mark.parametrize(
    "text",
    [
        answer(),
        f"```json\n{answer()}\n```",
        f"\n```\n{answer()}\n```\n",
        f"<think>Rules?\n```json\n[]\n```</think>\n```json\n{answer()}\n```",
    ],
)
def test_an_answer_becomes_a_file_of_rules(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    model = Model(completion(text))
    assert propose(model, tmp_path, "--api_key_env", "MY_KEY", "--count", "3", "--task", "Be quick.") == 0
    rules = read_rules(tmp_path / "rules.json")
    assert [(list(rule.body), rule.head, rule.confidence) for rule in rules.rules] == [
        (rule["body"], rule["head"], rule["confidence"]) for rule in RULES
    ]
    assert rules.rules[0].comment == "first the key"
    assert (rules.family, rules.comment) == ("doorkey", "Proposed by some/model for MiniGrid-DoorKey-6x6-v0.")
    assert "carries_key & door_in_front → opens_door" in capsys.readouterr().out
    (asked,) = model.asked
    prompt = make_prompt("doorkey", "MiniGrid-DoorKey-6x6-v0", 3, "Be quick.")
    assert asked["messages"] == [{"role": "user", "content": prompt}]
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("some/model", 0.7, 4096)
    assert model.keys == ["Bearer secret"]


def test_the_prompt_tells_all_that_predicates_say_about_themselves() -> None:
    prompt = make_prompt("doorkey", "MiniGrid-DoorKey-8x8-v0", 5, "Be quick.")
    assert FAMILY.about in prompt
    assert "MiniGrid-DoorKey-8x8-v0" in prompt
    assert "Be quick." in prompt
    assert "at most 5 rules" in prompt
    for name in FAMILY.predicates:
        assert f"- {name}: {FAMILY.meaning(name)}\n" in prompt
    (example,) = json.loads(prompt[prompt.rindex('{\n  "rules"') :])["rules"]
    assert read_answer(completion(answer([example])), "doorkey", 1)  # what it is shown would be taken


def test_a_model_that_answers_badly_is_asked_again(tmp_path: Path) -> None:
    model = Model(completion("Sure! Here they are: {}"), completion(answer()))
    assert propose(model, tmp_path) == 0
    assert len(model.asked) == 2


CODE = "__import__('pathlib').Path('executed').touch()"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"<html>", "answered with something else than a chat completion"),
        (json.dumps({"choices": []}).encode(), "answered with something else than a chat completion"),
        (completion(None), "answered without text"),
        (completion(answer(), finish_reason="length"), "the answer was cut short: raise --max_tokens"),
        (completion(f"Here: ```json\n{answer()}\n```"), "the answer is no JSON"),
        (completion(answer(RULES * 5)), "says the same as rule 1"),
        (
            completion(answer([RULES[0] | {"head": "opens_dor"}])),
            "unknown predicate 'opens_dor', did you mean 'opens_door'",
        ),
        (completion(answer([RULES[0] | {"head": CODE}])), "unknown predicate"),
        (completion(answer([RULES[0] | {"code": CODE}])), "rule 1 has 'code'"),
        (completion(answer([RULES[0] | {"confidence": 2}])), "confidence 2.0 must lie in [0, 1]"),
        (completion(json.dumps({"rules": RULES, "family": "os:system"})), "the file has 'family'"),
        (completion(json.dumps(RULES)), "the file must be an object with rules"),
        (completion("[" * 100_000), "brackets within brackets"),
        (completion(answer([RULES[0] | {"comment": "\ud800"}])), "half a character"),
        (completion(answer([RULES[0] | {"confidence": 10**400}])), "confidence inf must lie in [0, 1]"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_refused_and_nothing_is_executed(
    content: bytes,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    model = Model(content, content, content)
    assert propose(model, tmp_path) == 1
    assert len(model.asked) == 3
    error = capsys.readouterr().err.strip()
    assert error.startswith("vlmrb rules: error: http://127.0.0.1")
    assert "\n" not in error
    assert says in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["env.yaml"]


def test_more_rules_than_asked_for_are_refused() -> None:
    with pytest.raises(ValueError, match="the answer holds 2 rules, at most 1 were asked for"):
        read_answer(completion(answer()), "doorkey", 1)


def test_a_server_that_says_no_is_asked_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def refuse(path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        asked.append(path)
        return 400, b"no such model"

    assert propose(refuse, tmp_path) == 1  # type: ignore[arg-type]
    assert len(asked) == 1
    assert "status 400, no such model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "env_id", "says"),
    [
        ([], "MiniGrid-LavaCrossingS9N1-v0", "no predicates are known for it"),
        (["--family", "no_module:mine"], "MiniGrid-DoorKey-6x6-v0", "cannot import 'no_module'"),
        (["--count", "0"], "MiniGrid-DoorKey-6x6-v0", "--count 0 must be from 1 to 100"),
        (["--temperature", "-1"], "MiniGrid-DoorKey-6x6-v0", "temperature=-1.0 must be finite and not negative"),
        (["--url", "127.0.0.1"], "MiniGrid-DoorKey-6x6-v0", "is no address like"),
        (["--out", "."], "MiniGrid-DoorKey-6x6-v0", "exists already: name another file"),
    ],
)
def test_nothing_is_asked_where_nothing_can_come_of_it(
    more: list[str], env_id: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model()
    assert propose(model, tmp_path, *more, env_id=env_id) != 0
    assert model.asked == []
    assert says in capsys.readouterr().err
