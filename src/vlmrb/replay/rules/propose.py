"""Rules proposed by a language model behind an OpenAI-compatible chat endpoint.

The model is told what the predicates say about themselves, and answers with JSON. Of the answer nothing is executed;
one that is not exactly what was asked for is refused, and the model asked again.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Final

from vlmrb.replay.rules.predicates import find_predicates
from vlmrb.replay.rules.schema import RuleSet, load_json, parse_rules
from vlmrb.serving.client import Client

PATH: Final = "/chat/completions"
_THOUGHTS = re.compile(r"\s*<think>.*?</think>", re.DOTALL)
_FENCED = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL)


def make_prompt(family: str, env_id: str, count: int, task: str = "") -> str:
    """Returns what the model is asked.

    Args:
        family: as `find_predicates` takes it.
        env_id: of the environment.
        count: most rules wanted.
        task: what else it should know.
    """
    predicates = find_predicates(family)
    names = list(predicates.predicates)
    known = "\n".join(f"- {name}: {predicates.meaning(name)}" for name in names)
    example = {"body": [names[0]], "head": names[-1], "confidence": 0.8, "comment": "why"}
    told = f"\n\n{task.strip()}" if task.strip() else ""
    return (
        f"A reinforcement-learning agent learns in {env_id}. {predicates.about}{told}\n\n"
        "It learns from stored transitions (s, a, s'), and should see those more often that show progress towards the "
        "goal. Say which these are, by rules: where the body holds, a transition in which the head holds, too, is "
        "progress. Body and head are made of these predicates of a transition and of nothing else:\n\n"
        f"{known}\n\n"
        'A body is a list of predicates that must all hold; "not NAME" is the opposite of a predicate. A head is one '
        "predicate. The confidence, from 0 to 1, says how surely a transition of that kind is progress.\n\n"
        f"Give at most {count} rules, together for all stages of the task. Answer with JSON only, in this form:\n\n"
        f"{json.dumps({'rules': [example]}, indent=2)}\n"
    )


def propose_rules(
    client: Client,
    model: str,
    family: str,
    env_id: str,
    *,
    count: int = 8,
    task: str = "",
    temperature: float = 0.7,
    max_tokens: int = 4096,
    deadline_s: float = 300.0,
) -> RuleSet:
    """Asks for rules, up to three times.

    Args:
        client: of servers whose addresses end in the version, as in ``http://127.0.0.1:8000/v1``.
        model: as the server calls it.
        family: of predicates.
        env_id: of the environment.
        count: most rules wanted.
        task: what the model should know beyond what the family says about itself.
        temperature: of the answer. Higher → answers differ more, also when the model is asked again.
        max_tokens: of the answer, thoughts included.
        deadline_s: seconds in all.

    Raises:
        RefusedError: the server refuses the request.
        RemoteError: no usable answer; says what was wrong with the last one.
    """
    message = {"role": "user", "content": make_prompt(family, env_id, count, task)}
    request = {"model": model, "messages": [message], "temperature": temperature, "max_tokens": max_tokens}
    rules = client.ask(
        PATH,
        lambda content: read_answer(content, family, count),
        body=json.dumps(request).encode(),
        deadline_s=deadline_s,
    )
    return replace(rules, comment=f"Proposed by {model} for {env_id}.")


def read_answer(content: bytes, family: str, count: int) -> RuleSet:
    """Reads the rules in a server's answer.

    Args:
        content: the answer's body.
        family: of predicates.
        count: most rules allowed.

    Raises:
        ValueError: it is no chat completion, was cut short, or its text is something else than such rules, with or
            without thoughts (``<think>``) before and a fence of three backticks around them.
    """
    try:
        choice = load_json(content)["choices"][0]
        text, reason = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError("answered with something else than a chat completion") from error
    if not isinstance(text, str):
        raise ValueError("answered without text")
    if reason == "length":
        raise ValueError("the answer was cut short: raise --max_tokens")
    text = text[thoughts.end() :] if (thoughts := _THOUGHTS.match(text)) else text
    fenced = _FENCED.fullmatch(text.strip())
    try:
        found: Any = load_json(fenced[1] if fenced else text)
    except ValueError as error:
        raise ValueError(f"the answer is no JSON ({error}): {text.strip()[:120]!r}") from error
    rules = parse_rules(found, family)
    if len(rules.rules) > count:
        raise ValueError(f"the answer holds {len(rules.rules)} rules, at most {count} were asked for")
    return rules


def make_client(url: str, api_key_env: str, timeout_s: float) -> Client:
    """Makes the client; nothing is sent yet.

    Raises:
        ValueError: the address is none, or the library for HTTP is not installed.
    """
    if find_spec("urllib3") is None:
        raise ValueError("proposing rules needs urllib3: pip install 'vlmrb[remote]'")
    return Client(url, api_key_env, timeout_s=timeout_s)
