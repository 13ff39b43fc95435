"""The verbs about rules: `vlmrb rules predicates`, `vlmrb rules propose`, `vlmrb rules fit`."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vlmrb.ranges import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, SHARE, require

if TYPE_CHECKING:
    from vlmrb.replay.rules.fit import Finding
    from vlmrb.replay.rules.schema import RuleSet


def predicates(family: str | None = None) -> int:
    """Lists the predicates of a family, which rules are made of.

    Args:
        family: `doorkey`, or one of your own as `package.module:family`; lists the families that there are if not
            given.
    """
    from vlmrb.replay.rules.predicates import families, find_predicates

    if family is None:
        told = (f"{one.name}  for env.id {one.envs.pattern}\n" for one in families().values())
        sys.stdout.write("".join(told) + "\nvlmrb rules predicates --family NAME lists what rules of one are made of\n")
        return 0
    found = find_predicates(family)
    width = max(map(len, found.predicates), default=0)
    sys.stdout.write(f"{found.about}\n\n")
    sys.stdout.write("".join(f"{name:<{width}}  {found.meaning(name)}\n" for name in found.predicates))
    return 0


def propose(
    url: str,
    model: str,
    out: str,
    configs: Sequence[str] = (),
    family: str | None = None,
    count: int = 8,
    task: str = "",
    temperature: float = 0.7,
    max_tokens: int = 4096,
    timeout_s: float = 120.0,
    api_key_env: str = "OPENAI_API_KEY",
) -> int:
    """Asks a language model for rules, made of the predicates that are known for an environment.

    Read them before you train with them.

    Args:
        url: address of an OpenAI-compatible server up to and including the version, such as http://127.0.0.1:8000/v1.
        model: as the server calls it.
        out: file for the rules, new.
        configs: configurations with an `env` section, as for `vlmrb fit`; also written -c.
        family: of predicates, as `package.module:family`; found by env.id if not given.
        count: most rules wanted.
        task: what the model should know about the task beyond what the family says about itself.
        temperature: of the answer. Higher → answers differ more.
        max_tokens: of the answer, thoughts included.
        timeout_s: seconds that an answer may take; the model is asked up to three times.
        api_key_env: environment variable with the server's API key; if it is not set, none is sent.
    """
    from vlmrb.replay.rules.predicates import find_predicates
    from vlmrb.replay.rules.propose import make_client, propose_rules
    from vlmrb.replay.rules.schema import MAX_RULES, write_rules
    from vlmrb.settings import load_env

    if not 1 <= count <= MAX_RULES:
        raise ValueError(f"--count {count} must be from 1 to {MAX_RULES}")
    require(AT_LEAST_ONE, "rules propose", max_tokens=max_tokens)
    require(NOT_NEGATIVE, "rules propose", temperature=temperature)
    require(POSITIVE, "rules propose", timeout_s=timeout_s)
    path = _new_file(out)
    env_id = load_env(configs).id
    name = _family_of(env_id) if family is None else family
    find_predicates(name)
    client = make_client(url, api_key_env, timeout_s)
    try:
        rules = propose_rules(
            client,
            model,
            name,
            env_id,
            count=count,
            task=task,
            temperature=temperature,
            max_tokens=max_tokens,
            deadline_s=3 * timeout_s,
        )
    finally:
        client.close()
    write_rules(path, rules)
    sys.stdout.write("".join(f"{rule.confidence:.2f}  {rule}\n" for rule in rules.rules) + f"{path}\n")
    return 0


def fit(
    rules: str,
    episodes: str,
    out: str,
    configs: Sequence[str] = (),
    min_episodes: int = 10,
    level: float = 0.05,
    seed: int = 0,
) -> int:
    """Fits the confidences of rules to recorded episodes; rules that these do not support get confidence 0.

    Args:
        rules: file of rules.
        episodes: folder of `vlmrb record`, best of play that succeeds now and then.
        out: file for the same rules with fitted confidences, new.
        configs: the run's configurations, which say its training.gamma and replay.n_steps; also written -c.
        min_episodes: a rule keeps its confidence if it was seen in fewer episodes.
        level: a rule is supported if chance explains its higher return with at most this probability.
        seed: of the bootstrap.
    """
    from vlmrb.algorithms.config import TrainingConfig
    from vlmrb.recording import Recording, episode_files
    from vlmrb.replay.config import ReplayConfig
    from vlmrb.replay.rules.fit import fit_confidences, gather_evidence
    from vlmrb.replay.rules.schema import read_rules, write_rules
    from vlmrb.settings import read_section

    require(AT_LEAST_ONE, "rules fit", min_episodes=min_episodes)
    require(NOT_NEGATIVE, "rules fit", seed=seed)
    require(SHARE, "rules fit", level=level)
    path, folder, given = _new_file(out), Path(episodes), read_rules(rules)
    training, replay = TrainingConfig(), ReplayConfig()
    gamma, n_steps = training.gamma, replay.n_steps
    for file in configs:
        gamma = read_section(file, "training").get("gamma", gamma)
        n_steps = read_section(file, "replay").get("n_steps", n_steps)
    if isinstance(gamma, bool) or not isinstance(gamma, int | float):
        raise ValueError(f"training.gamma={gamma!r} must be a number in [0, 1]")
    if isinstance(n_steps, bool) or not isinstance(n_steps, int):
        raise ValueError(f"replay.n_steps={n_steps!r} must be a whole number")
    require(SHARE, "training", gamma=gamma)
    require(AT_LEAST_ONE, "replay", n_steps=n_steps)
    files = episode_files(folder)
    if not files:
        raise ValueError(f"--episodes {folder} holds no recorded episodes: make some with vlmrb record")
    recording = Recording.read(folder)
    if recording is not None and not given.predicates.claims(recording.env.id):
        raise ValueError(f"--episodes {folder} are of {recording.env.id}, and {rules} is for {given.family}")
    evidence = gather_evidence(given, files, gamma, n_steps)
    confidences = [rule.confidence for rule in given.rules]
    findings = fit_confidences(evidence, confidences, min_episodes=min_episodes, level=level, seed=seed)
    sys.stdout.write(_table(given, findings))
    if not any(finding.confidence for finding in findings):
        raise ValueError(f"--episodes {folder} support none of the rules in {rules}: nothing is written")
    fitted = f"Confidences fitted to {len(files)} episodes: gamma {gamma:g}, n_steps {n_steps}."
    comment = f"{given.comment} {fitted}".strip()
    write_rules(path, given.with_confidences([round(finding.confidence, 4) for finding in findings], comment))
    sys.stdout.write(f"{path}\n")
    return 0


def _table(rules: RuleSet, findings: Sequence[Finding]) -> str:
    lines = ["before  after  status    episodes  gain in return      p  rule\n"]
    for rule, found in zip(rules.rules, findings, strict=True):
        gain, p = ("–" if math.isnan(value) else f"{value:.4f}" for value in (found.gain, found.p))
        numbers = (
            f"{rule.confidence:6.2f} {found.confidence:6.2f}  {found.status:<8} {found.episodes:9} {gain:>15} {p:>6}"
        )
        lines.append(f"{numbers}  {rule}\n")
    lines.append("only the ratios of confidences matter: a priority reads their weighted mean\n")
    return "".join(lines)


def _family_of(env_id: str) -> str:
    """Returns the name by which a file of rules finds the predicates of an environment.

    Those of one's own come with the module that ``env.id`` names, or have been named on the command line.
    """
    from vlmrb.replay.rules.predicates import is_built_in, predicates_for

    family, module = predicates_for(env_id), env_id.rpartition(":")[0]
    return family.name if is_built_in(family) or not module else f"{module}:{family.name}"


def _new_file(out: str) -> Path:
    path = Path(out)
    if path.exists():
        raise FileExistsError(f"--out {out} exists already: name another file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--out {out}: there is no folder {path.parent}")
    return path
