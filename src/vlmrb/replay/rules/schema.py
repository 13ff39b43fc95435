"""Rules {body, head, confidence} over registered predicates: read, checked and written as JSON.

::

    {
      "family": "doorkey",
      "rules": [
        {"body": ["carries_key", "door_in_front", "not door_open"], "head": "opens_door", "confidence": 0.9}
      ]
    }

The body is a list of predicates or their negations (``"not NAME"``), the head one of them. Files are data: nothing in
them is executed, and a name that no predicate has is an error.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vlmrb.replay.rules.predicates import PredicateFamily, find_predicates

NOT: Final = "not "
MAX_RULES: Final = 100


@dataclass(frozen=True)
class Rule:
    """Where the body holds, the head is progress.

    Attributes:
        body: predicates or their negations that must hold together; none: always.
        head: the same, one.
        confidence: c in [0, 1], the rule's weight.
        comment: for people.
    """

    body: tuple[str, ...]
    head: str
    confidence: float
    comment: str = ""

    @property
    def literals(self) -> tuple[str, ...]:
        """Body and head."""
        return (*self.body, self.head)

    def __str__(self) -> str:
        return f"{' & '.join(self.body) or 'always'} → {self.head}"


@dataclass(frozen=True)
class RuleSet:
    """Rules of one family.

    Attributes:
        family: as `find_predicates` takes it.
        rules: at least one, of different body and head, one of them with a positive confidence.
        comment: for people.

    Raises:
        ValueError: there is no such family or predicate, a confidence lies outside [0, 1], or all are 0.
    """

    family: str
    rules: tuple[Rule, ...]
    comment: str = ""

    def __post_init__(self) -> None:
        """Refuses what cannot work."""
        if not 1 <= len(self.rules) <= MAX_RULES:
            raise ValueError(f"expected 1 to {MAX_RULES} rules, got {len(self.rules)}")
        predicates, seen = self.predicates, dict[Any, int]()
        for number, rule in enumerate(self.rules, 1):
            try:
                for literal in rule.literals:
                    predicates.require(literal.removeprefix(NOT))
                if not 0 <= rule.confidence <= 1:
                    raise ValueError(f"confidence {rule.confidence} must lie in [0, 1]")
                if other := seen.get(_content(rule)):
                    raise ValueError(f"says the same as rule {other}")
            except ValueError as error:
                raise ValueError(f"rule {number} ({rule}): {error}") from error
            seen[_content(rule)] = number
        if not any(rule.confidence for rule in self.rules):
            raise ValueError("every confidence is 0: the rules have no effect")

    @cached_property
    def predicates(self) -> PredicateFamily:
        """The family that the rules' predicates belong to."""
        return find_predicates(self.family)

    @cached_property
    def confidences(self) -> NDArray[np.float64]:
        """``float64[R]``."""
        return np.array([rule.confidence for rule in self.rules], np.float64)

    @cached_property
    def digest(self) -> str:
        """Tells rule sets apart whose truths or weights may differ; comments and order do not count."""
        content = sorted([*map(list, _content(rule)), rule.confidence] for rule in self.rules)
        return hashlib.blake2b(json.dumps([self.family, content]).encode(), digest_size=8).hexdigest()

    def truths(
        self, observation: NDArray, action: NDArray, next_observation: NDArray
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns how true bodies and whole rules are, in product logic.

        Args:
            observation: ``[K, …]``, s.
            action: ``[K]`` or ``[K, A]``, a.
            next_observation: ``[K, …]``, s'.

        Returns:
            The bodies' truths ``float64[K, R]``, ``Π φ`` over their predicates with ``1 − φ`` for a negation, and the
            rules' ``T = body ∧ head``, ``float64[K, R]``: not the implication, which holds wherever the body does not.

        Raises:
            ValueError: a predicate gave something else than truths.
        """
        family = self.predicates
        s, s2 = family.view(observation), family.view(next_observation)
        names = {literal.removeprefix(NOT) for rule in self.rules for literal in rule.literals}
        truth = {name: family.truth(name, s, action, s2) for name in names}
        truth |= {f"{NOT}{name}": 1 - values for name, values in truth.items()}
        always = np.ones(len(action))
        body = np.stack([_product([truth[name] for name in rule.body], always) for rule in self.rules], axis=1)
        return body, body * np.stack([truth[rule.head] for rule in self.rules], axis=1)

    def weighted_truth(self, observation: NDArray, action: NDArray, next_observation: NDArray) -> NDArray[np.float64]:
        """Returns ``Σ c_k T_k / Σ c_k``, ``float64[K]`` in [0, 1]; arguments as for `truths`."""
        _, whole = self.truths(observation, action, next_observation)
        return np.clip(whole @ self.confidences / self.confidences.sum(), 0, 1)

    def with_confidences(self, confidences: Sequence[float], comment: str) -> RuleSet:
        """Returns the same rules with other confidences, one for each."""
        rules = zip(self.rules, confidences, strict=True)
        return replace(self, rules=tuple(replace(rule, confidence=float(c)) for rule, c in rules), comment=comment)


def parse_rules(content: Any, family: str | None = None) -> RuleSet:
    """Makes rules of what JSON holds; anything that is not asked for is refused.

    Args:
        content: the parsed JSON.
        family: of rules whose JSON names none.

    Raises:
        ValueError: says which rule is wrong.
    """
    required = ("rules",) if family is not None else ("family", "rules")
    _require_keys(content, required, ("comment",), "the file")
    if not isinstance(content["rules"], list):
        raise ValueError('"rules" must be a list')
    rules = []
    for number, entry in enumerate(content["rules"], 1):
        where = f"rule {number}"
        _require_keys(entry, ("body", "head", "confidence"), ("comment",), where)
        body, confidence = entry["body"], entry["confidence"]
        if not isinstance(body, list) or not all(isinstance(literal, str) for literal in body):
            raise ValueError(f'{where}: "body" must be a list of predicates')
        if not isinstance(entry["head"], str):
            raise ValueError(f'{where}: "head" must be a predicate')
        if isinstance(confidence, bool) or not isinstance(confidence, int | float):
            raise ValueError(f'{where}: "confidence" must be a number')
        body = tuple(map(_literal, body))
        try:
            confidence = float(confidence)
        except OverflowError:  # JSON's whole numbers may be of any size
            confidence = math.inf
        rules.append(Rule(body, _literal(entry["head"]), confidence, _text(entry, where)))
    name = content["family"] if family is None else family
    if not isinstance(name, str):
        raise ValueError('"family" must be a name')
    return RuleSet(name, tuple(rules), _text(content, "the file"))


def read_rules(path: str | Path) -> RuleSet:
    """Reads a file of rules.

    Raises:
        ValueError: it does not exist, is no JSON, or holds something else than rules that can work; names the file.
    """
    try:
        return parse_rules(load_json(Path(path).read_text()))
    except OSError as error:
        raise ValueError(f"rules {path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # of JSON, Unicode, and ours
        raise ValueError(f"rules {path}: {error}") from error


def load_json(text: str | bytes) -> Any:
    """Parses JSON.

    Raises:
        ValueError: it is none, or lies deeper within itself than anything of ours does.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("brackets within brackets, too many to read") from error


def write_rules(path: str | Path, rules: RuleSet) -> None:
    """Writes what `read_rules` reads, one rule a line."""
    head = {"comment": rules.comment} if rules.comment else {}
    lines = [json.dumps(value)[1:-1] for value in ({"family": rules.family}, head) if value]
    entries = ",\n".join(f"    {json.dumps(_entry(rule), ensure_ascii=False)}" for rule in rules.rules)
    text = "{\n" + "".join(f"  {line},\n" for line in lines) + f'  "rules": [\n{entries}\n  ]\n}}\n'
    Path(path).write_bytes(text.encode())


def _entry(rule: Rule) -> dict[str, Any]:
    entry = {"body": list(rule.body), "head": rule.head, "confidence": rule.confidence}
    return entry | ({"comment": rule.comment} if rule.comment else {})


def _literal(text: str) -> str:
    """Normalises the blanks of ``not NAME``."""
    words = text.split()
    return NOT + words[1] if len(words) == 2 and words[0] == NOT.strip() else text.strip()


def _content(rule: Rule) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(sorted(rule.body)), (rule.head,)


def _product(factors: Sequence[NDArray[np.float64]], start: NDArray[np.float64]) -> NDArray[np.float64]:
    for factor in factors:
        start = start * factor
    return start


def _require_keys(content: Any, required: Sequence[str], optional: Sequence[str], where: str) -> None:
    if not isinstance(content, Mapping):
        raise ValueError(f"{where} must be an object with {', '.join(required)}")
    for name in required:
        if name not in content:
            raise ValueError(f"{where} lacks {name!r}")
    for name in content:
        if name not in (*required, *optional):
            raise ValueError(f"{where} has {name!r}, and knows only {', '.join((*required, *optional))}")


def _text(entry: Mapping[str, Any], where: str) -> str:
    comment = entry.get("comment", "")
    if not isinstance(comment, str):
        raise ValueError(f'{where}: "comment" must be text')
    if any("\ud800" <= character <= "\udfff" for character in comment):  # half of a character: JSON can spell it
        raise ValueError(f'{where}: "comment" holds half a character, which no file can hold')
    return comment
