"""From a model's next-token logits to the paper's r: the tokens that mean yes or no, and their probabilities."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from vlmrb.scoring.prompts import Prompt
from vlmrb.scoring.scorer import ScorerError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

RECENT_CLIPS = 1000  # over which the candidate mass is reported
LITTLE_MASS = 0.5


@dataclass(frozen=True)
class AnswerTokens:
    """The tokens that count as yes and as no; equally many, spelled alike in pairs.

    Attributes:
        yes: token ids.
        no: token ids.
        spellings: the pairs of words behind them, for the log.
    """

    yes: tuple[int, ...]
    no: tuple[int, ...]
    spellings: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        words = ", ".join(f"{yes!r}/{no!r}" for yes, no in self.spellings)
        return f"{words} (tokens {', '.join(map(str, self.ids))})"

    @property
    def ids(self) -> tuple[int, ...]:
        """All ids, yes first."""
        return (*self.yes, *self.no)


def spellings(word: str) -> list[str]:
    """Returns how a model may spell a word: lower, title and upper case, each with and without a space before it."""
    return [f"{space}{form}" for form in (word.lower(), word.capitalize(), word.upper()) for space in ("", " ")]


def find_answer_tokens(tokenizer: Any, prompt: Prompt) -> AnswerTokens:
    """Looks the prompt's two words up in a vocabulary.

    A spelling counts if it is a single token for both words: an unpaired one would favour its side.

    Args:
        tokenizer: a transformers tokenizer.
        prompt: whose words are meant.

    Raises:
        ScorerError: no spelling of both words is a single token of its own.
    """
    pairs: dict[tuple[int, int], tuple[str, str]] = {}
    for yes, no in zip(spellings(prompt.yes), spellings(prompt.no), strict=True):
        ids = _single_token(tokenizer, yes), _single_token(tokenizer, no)
        if None not in ids and ids[0] != ids[1]:
            pairs.setdefault(ids, (yes, no))  # type: ignore[arg-type]
    yes_ids = tuple(dict.fromkeys(yes for yes, _ in pairs))
    no_ids = tuple(dict.fromkeys(no for _, no in pairs))
    if not pairs or set(yes_ids) & set(no_ids):
        raise ScorerError(
            f"the model's tokenizer has no single tokens for {prompt.yes!r} and {prompt.no!r}: choose other words for "
            "scorer.init_args.prompt (yes: …, no: …) that it knows whole, and ask for them in its text"
        )
    return AnswerTokens(yes_ids, no_ids, tuple(pairs.values()))


def _single_token(tokenizer: Any, text: str) -> int | None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    unknown = getattr(tokenizer, "unk_token_id", None)
    return ids[0] if len(ids) == 1 and ids[0] != unknown else None


def judge(logits: torch.Tensor, answers: AnswerTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns next-token logits into scores (the paper's section on scoring).

    r = P(yes) / (P(yes) + P(no)), each P summed over the spellings; computed from log-probabilities, so that it is
    right even where both are tiny.

    Args:
        logits: ``[B, V]`` of any floating dtype.
        answers: which tokens count.

    Returns:
        r and the mass P(yes) + P(no), each ``float32[B]`` in [0, 1].
    """
    import torch

    log_probabilities = logits.float().log_softmax(-1)
    yes = log_probabilities[:, list(answers.yes)].logsumexp(-1)
    no = log_probabilities[:, list(answers.no)].logsumexp(-1)
    return torch.sigmoid(yes - no), torch.exp(torch.logaddexp(yes, no)).clamp(max=1.0)


class CandidateMass:
    """Keeps the mass P(yes) + P(no) of recent clips, and warns once if it is small.

    Args:
        scorer: whose name the warning begins with.
    """

    def __init__(self, scorer: str) -> None:
        self._scorer = scorer
        self._recent: deque[float] = deque(maxlen=RECENT_CLIPS)
        self._warned = False

    def note(self, masses: Sequence[float]) -> None:
        """Takes the masses of further clips, at least one."""
        self._recent.extend(masses)
        if not self._warned and (mean := fmean(masses)) < LITTLE_MASS:
            self._warned = True
            logger.warning(
                "scorer %s: only %.2g of the probability is on yes or no, so the model wants to say something else: "
                "end the prompt with the two words to choose from, or take another model",
                *(self._scorer, mean),
            )

    def stats(self) -> dict[str, float]:
        """Returns the mean ``mass`` and the lowest, ``mass_min``; nothing before the first clip."""
        return {"mass": fmean(self._recent), "mass_min": min(self._recent)} if self._recent else {}
