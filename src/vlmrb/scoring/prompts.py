"""The questions put to a vision-language model (the paper's appendix on prompts, in this project's words).

A prompt is a named, versioned object; both are part of the score cache's key. In a configuration it is a name from
`PROMPTS` or simply a text of your own:

    prompt: "Does the robot put the cube into the drawer in this clip? Answer yes or no."
"""

from __future__ import annotations

import difflib
import hashlib
import re
from dataclasses import dataclass

_ANSWER = "Answer with one word, {yes} or {no}."


@dataclass(frozen=True)
class Prompt:
    """One yes/no question about a clip.

    Attributes:
        text: the question as the model reads it; it must ask for the two words.
        name: short, for logs and tables.
        version: changes with the text of a named prompt; of a text of your own, its digest.
        yes: the word that means success; another language's word goes with a text in that language.
        no: the word that means no success.
    """

    text: str
    name: str = "custom"
    version: str = ""
    yes: str = "yes"
    no: str = "no"

    def __post_init__(self) -> None:
        """Refuses what cannot be answered, in one line."""
        if not self.text.strip():
            raise ValueError("prompt is empty: ask a yes/no question about the clip")
        for what, word in (("yes", self.yes), ("no", self.no)):
            if not word or word != word.strip() or len(word.split()) != 1:
                raise ValueError(f"prompt.{what}={word!r} must be a single word")
        if self.yes.lower() == self.no.lower():
            raise ValueError(f"prompt.yes and prompt.no are the same word, {self.yes!r}")
        missing = [word for word in (self.yes, self.no) if not re.search(rf"\b{re.escape(word)}\b", self.text, re.I)]
        if missing:
            raise ValueError(
                f"prompt {self.text!r} never says {' or '.join(map(repr, missing))}: end it with "
                f'"{_ANSWER.format(yes=self.yes, no=self.no)}", or the model answers something else'
            )
        if not self.version:
            digest = hashlib.blake2b(repr((self.text, self.yes, self.no)).encode(), digest_size=6).hexdigest()
            object.__setattr__(self, "version", digest)


def _named(name: str, text: str, version: str = "1") -> Prompt:
    return Prompt(f"{text} {_ANSWER.format(yes='yes', no='no')}", name, version)


# Grid worlds: the base form names no key or door, so that the same words serve every task of the domain. Paraphrases,
# a terse and an under-specified form are there to measure how much the wording matters (`vlmrb calibrate`).
_GRID = [
    _named(
        "grid",
        "You see a short video of an agent that moves through a grid world. Judge by visible events only. Is the goal "
        "of the task clearly achieved at least once in this clip?",
    ),
    _named(
        "grid_paraphrase_a",
        "These frames are consecutive moments of an agent exploring a small maze of tiles. Judge only what you see. At "
        "any moment of the clip, is it plain to see that the agent accomplishes its goal?",
    ),
    _named(
        "grid_paraphrase_b",
        "Watch this recording of a tile-based game from its first to its last frame. Does the player's objective get "
        "fulfilled, unmistakably, at some moment of it?",
    ),
    _named("grid_terse", "Goal achieved in this clip?"),
    _named("grid_underspecified", "Is this good?"),
]

# Manipulation: success shows as contact followed by displacement.
_MANIPULATION = [
    _named(
        "manipulation",
        "You see a short video of a robot arm at a table. Look for contact between gripper and object followed by "
        "displacement: something is lifted, placed, opened, closed, or moved into a target area. Is the goal clearly "
        "achieved in this way at least once in this clip?",
    ),
    _named(
        "manipulation_terse",
        "Does the robot touch an object and thereby clearly move, lift, place, open or close it in this clip?",
    ),
]

PROMPTS: dict[str, Prompt] = {prompt.name: prompt for prompt in (*_GRID, *_MANIPULATION)}

TEMPLATE = (
    "You see a short video of {who} in {where}. Look for {evidence}. "
    "Does {who} clearly achieve {achievement} at least once in this clip?"
)


def new_domain(who: str, where: str, evidence: str, achievement: str) -> Prompt:
    """Fills the template for a new domain; one prompt should serve all tasks of it.

    Args:
        who: who acts, "a quadruped robot".
        where: the surroundings, "a corridor with obstacles".
        evidence: what success looks like in pixels, "feet that leave the ground followed by forward motion".
        achievement: what counts, "a step past an obstacle".
    """
    text = TEMPLATE.format(who=who, where=where, evidence=evidence, achievement=achievement)
    return Prompt(f"{text} {_ANSWER.format(yes='yes', no='no')}")


def make_prompt(prompt: str | Prompt) -> Prompt:
    """Returns a named prompt, or one made of a text.

    Raises:
        ValueError: a single word that is no prompt's name, or a text that asks for no answer.
    """
    if isinstance(prompt, Prompt):
        return prompt
    if prompt in PROMPTS:
        return PROMPTS[prompt]
    if len(prompt.split()) == 1:
        close = difflib.get_close_matches(prompt, PROMPTS, n=1)
        raise ValueError(
            f"prompt {prompt!r} is unknown{f'; did you mean {close[0]}?' if close else ''} (known: "
            f"{', '.join(PROMPTS)}; anything longer than a word is taken as the prompt itself)"
        )
    return Prompt(prompt)
