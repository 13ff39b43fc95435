"""Selection policies that look at more than a clip's age."""

from vlmrb.scoring.policies.guessed import ExpectedFirst, UncertainFirst
from vlmrb.scoring.policies.mix import Mix, MixPart
from vlmrb.scoring.policies.novelty import NovelFirst

__all__ = ["ExpectedFirst", "Mix", "MixPart", "NovelFirst", "UncertainFirst"]
