"""What the settings of a run say: its replay scheme, its scorer, and where two runs differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from vlmrb.callbacks.config import EvaluationConfig
from vlmrb.envs.config import EnvConfig
from vlmrb.experiments.report.files import Kinds
from vlmrb.replay.config import ReplayConfig, VLMConfig
from vlmrb.settings import leaves

Settings = Mapping[str, Any]
"""A configuration as nested mappings, empty where it is not known."""

# Sections that decide a run's results, and settings in them that do not.
_SECTIONS = ("env", "training", "model", "replay", "scoring", "evaluation", "prefill")
_IDLE = (
    *("env.workers", "env.worker_timeout_s", "replay.storage", "replay.memory_limit_gib", "replay.scratch_dir"),
    *("scoring.cache", "scoring.preflight", "scoring.timeout_s", "scoring.startup_timeout_s", "scoring.backoff_s"),
    "evaluation.video_every_n_env_steps",
)
_DEFAULTS = {"env": EnvConfig, "replay": ReplayConfig, "replay.vlm": VLMConfig, "evaluation": EvaluationConfig}

_NONE = type(None)
_CLASSES = ("model", "scoring.scorer", "scoring.control")
KINDS: Kinds = {
    **dict.fromkeys(("env", "training", "replay", "scoring", "evaluation", "replay.vlm"), (Mapping, _NONE)),
    **dict.fromkeys(_CLASSES, (Mapping, str, _NONE)),
    **{f"{name}.class_path": (str,) for name in _CLASSES},
    **{f"{name}.init_args": (Mapping, _NONE) for name in _CLASSES},
    **dict.fromkeys(("env.id", "scoring.scorer.init_args.model"), (str,)),
    **dict.fromkeys(("training.total_env_steps", "replay.lam_max", "scoring.control.init_args.kappa"), (int, float)),
    **{"replay.vlm.threshold": (int, float, _NONE), "env.actions": (list, _NONE)},
}
"""Of the settings that a report looks into: what each of them can be."""

# Sections of `replay` that are no scheme, and those that act however small λ is.
_NO_SCHEME = ("importance_weights",)
_ACT_ALWAYS = ("aer", "her", "score_reward")

ScorerKind = Literal["none", "vlm", "hand-made", "privileged", "tiny", "other", "unknown"]

NOT_RECORDED = "scorer not recorded"

# Only these names are called VLMs: public checkpoints, never trained for the task.
_VLMS = {
    "facebook/Perception-LM-1B": "PLM-1B",
    "facebook/Perception-LM-3B": "PLM-3B",
    "facebook/Perception-LM-8B": "PLM-8B",
    "google/gemma-4-E4B-it": "Gemma-4-E4B",
    "Qwen/Qwen3-VL-2B-Instruct": "Qwen3-VL-2B",
    "HuggingFaceTB/SmolVLM2-500M-Video-Instruct": "SmolVLM2-500M",
}


@dataclass(frozen=True)
class ScorerName:
    """What gave the scores, in words that claim no more than is known.

    Attributes:
        name: short, for legends and column heads.
        kind: only ``vlm`` is one; see `remark` for the others.
    """

    name: str
    kind: ScorerKind

    @property
    def remark(self) -> str:
        """What kind of scorer this is, empty for a VLM and where there is none."""
        if self.name == NOT_RECORDED:
            return "the settings that name it are not kept with the runs"
        return {
            "none": "",
            "vlm": "",
            "hand-made": "hand-made recogniser, not a VLM",
            "privileged": "privileged: reads the simulator's state, not a VLM",
            "tiny": "tiny model trained on privileged labels, no evidence for any VLM",
            "other": "not known to be a VLM",
            "unknown": "not recorded what it is",
        }[self.kind]

    @property
    def short(self) -> str:
        """Its name with its kind in a word or two, for tables."""
        kinds = {
            "hand-made": "hand-made",
            "privileged": "privileged",
            "tiny": "trained for this",
            "other": "no known VLM",
        }
        return f"{self.name} ({kinds[self.kind]})" if self.kind in kinds else self.name


def scorer_of(scoring: Any) -> ScorerName:
    """Names the scorer of a ``scoring`` section.

    Args:
        scoring: the section; ``None`` where the settings are not known.
    """
    if not isinstance(scoring, Mapping) or "scorer" not in scoring:
        return ScorerName(NOT_RECORDED, "unknown")
    scorer = scoring["scorer"]
    if scorer is None:
        return ScorerName("no scorer", "none")
    path, arguments = _class_of(scorer)
    return named_scorer(path, str(arguments.get("model", ""))) if path else ScorerName(NOT_RECORDED, "unknown")


def _class_of(value: str | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Returns a class's path and its arguments; the path is empty if only arguments are known."""
    return (value, {}) if isinstance(value, str) else (value.get("class_path", ""), value.get("init_args") or {})


def named_scorer(class_path: str, model: str = "") -> ScorerName:
    """Names a scorer by its class and, where it asks a model, the model's id or folder."""
    name = class_path.rpartition(".")[2]
    if name == "SpritesScorer":
        return ScorerName("sprites", "hand-made")
    if name == "MilestonesScorer":
        return ScorerName("milestones", "privileged")
    if name == "RemoteScorer":
        return ScorerName("remote scorer", "unknown")
    if name in ("HFScorer", "OpenAIScorer"):
        if (known := known_vlm(model)) is not None:
            return ScorerName(known, "vlm")
        last = model.rstrip("/").rpartition("/")[2]
        return ScorerName(f"tiny {last}", "tiny") if "tiny_vlm" in model else ScorerName(last or model, "other")
    return ScorerName(name, "other")


def known_vlm(model: str) -> str | None:
    """Returns the short name of a public checkpoint, given by id or folder, ``None`` for any other model."""
    last = model.rstrip("/").rpartition("/")[2].lower()
    return next((name for key, name in _VLMS.items() if key.rpartition("/")[2].lower() == last), None)


def get(settings: Settings, key: str) -> Any:
    """Returns a setting by its dotted name, its default where the configuration does not name it.

    Raises:
        KeyError: the configuration does not say.
    """
    found: Any = settings
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return _default(key) if settings else _missing(key)
        found = found[part]
    return found


def _default(key: str) -> Any:
    section, _, name = key.rpartition(".")
    for field in fields(_DEFAULTS[section]) if section in _DEFAULTS else ():
        if field.name == name and field.default is not MISSING:
            return field.default
    return None if key == "scoring.control" else _missing(key)


def _missing(key: str) -> Any:
    raise KeyError(key)


def scheme_kind(settings: Settings) -> str:
    """Names a replay scheme by what its configuration turns on.

    Returns:
        ``uniform``, ``per``, ``vlm`` (score only), ``vlm_td`` (score × TD error), else the sections of ``replay`` that
        shape it, such as ``rank`` or ``relo+vlm``; empty if the settings are not known.
    """
    replay = settings.get("replay")
    if not isinstance(replay, Mapping):
        return ""
    replay = {"vlm": {}, **replay}  # on by default, where a configuration does not say
    on = sorted(str(name) for name, value in replay.items() if isinstance(value, Mapping) and name not in _NO_SCHEME)
    if replay.get("lam_max", 0.5) == 0:
        on = [name for name in on if name in _ACT_ALWAYS]
    names = {(): "uniform", ("td",): "per", ("vlm",): "vlm", ("td", "vlm"): "vlm_td"}
    return names.get(tuple(on), "+".join(on))


def control_of(settings: Settings) -> tuple[str, float | None]:
    """Returns the control between scorer and buffer: ``("", None)``, ``("corrupted", κ)`` or another's class name."""
    control = get(settings, "scoring.control") if settings else None
    if control is None:
        return "", None
    path, arguments = _class_of(control)
    name = path.rpartition(".")[2].lower() or "unknown"
    return name, float(arguments.get("kappa", 0.1)) if name == "corrupted" else None


def label_of(settings: Settings) -> str:
    """Returns a label for a run that no sweep has named: its scheme and its control."""
    control, kappa = control_of(settings)
    parts = [scheme_kind(settings) or "unnamed", f"{control} {kappa:g}" if kappa is not None else control]
    return ", ".join(part for part in parts if part)


def flat(settings: Settings) -> dict[str, Any]:
    """Returns what decides a run's results as dotted name → value."""
    kept = {section: settings[section] for section in _SECTIONS if section in settings}
    return {key: value for key, value in leaves(kept) if key not in _IDLE}


def signature(settings: Settings, without: tuple[str, ...]) -> str:
    """Returns a text that two runs share if they differ at most in some settings.

    Args:
        settings: of a run.
        without: dotted names, or beginnings of names, that do not count.
    """
    kept = {key: value for key, value in flat(settings).items() if not key.startswith(without)}
    return json.dumps(kept, sort_keys=True, default=str)


def differences(one: Settings, other: Settings) -> dict[str, tuple[Any, Any]]:
    """Returns dotted name → both values, of the settings in which two runs differ.

    Settings that only one of them knows are another version's, and do not count, unless the other one turns their
    whole section off.
    """
    first, second = flat(one), flat(other)
    found: dict[str, tuple[Any, Any]] = {
        key: (first[key], second[key]) for key in first.keys() & second if first[key] != second[key]
    }
    for here, there, values in ((first, second, (None, "set")), (second, first, ("set", None))):
        off = {key for key, value in here.items() if value is None and key not in there}
        for key in off & {section for name in there for section in _sections(name)}:
            found[key] = values
    return dict(sorted(found.items()))


def _sections(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts)))
