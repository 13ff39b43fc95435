"""Any image-text-to-text model of the transformers library as a scorer: the paper's, and others.

One forward pass a clip: frames and a yes/no question through the model's own chat template, then r = P(yes) / (P(yes) +
P(no)) at the first token of the answer. Nothing is generated.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.prompts import Prompt, make_prompt
from vlmrb.scoring.scorer import Scorer, ScorerError
from vlmrb.scoring.vlm.answers import CandidateMass
from vlmrb.scoring.vlm.memory import is_out_of_memory, weight_bytes

if TYPE_CHECKING:
    from vlmrb.scoring.vlm.chat import Chat
    from vlmrb.scoring.vlm.paths import FastPath, PlainPath
    from vlmrb.scoring.vlm.paths import Path as ScoringPath
    from vlmrb.scoring.vlm.unique_frames import UniqueFrames

logger = logging.getLogger(__name__)

_VERSION = 1  # part of the scorer's version: raise it when answers may change
DTYPES = ("auto", "float32", "bfloat16", "float16")
DRIFT = 0.02  # largest difference in r by which the fast path may miss the plain one; 16-bit arithmetic stays below


class HFScorer(Scorer):
    """Asks a vision-language model whether a clip shows success.

    Args:
        model: an id on the hugging face hub, or a folder as ``save_pretrained`` writes it.
        revision: the id's branch, tag or commit; ``None`` is the main branch. Pin a commit to repeat a run for certain;
            a folder is told apart by what is in it.
        dtype: of the weights, as in torch (``bfloat16``, ``float16``, ``float32``); ``auto`` is what they were saved
            in. 16 bit → half the memory, quicker on GPUs, scores that move a little.
        device: as in torch; ``auto`` is the first GPU if there is one, else the CPU.
        attn_implementation: as in transformers (``sdpa``, ``eager``, ``flash_attention_2``, …); ``None`` leaves it the
            choice.
        prompt: a name from `prompts.PROMPTS`, a question of your own, or a `Prompt` (for other words than yes and no).
        frame_size: pixels, upper bound of a frame's sides to render; ``None`` becomes, at `setup`, what the model's
            patch grid takes without resizing, or 256 for models that take any size. Higher → finer detail and more
            tokens there.
        batch_clips: most clips in one forward pass. Higher → more clips/s from a GPU, more memory; a batch that does
            not fit is halved by itself, for good.
        video: show clips as videos (``True``), as lists of images (``False``), or as the model can (``auto``).
        fps: frames per second that the model is told a clip has. Some families write the times into the prompt, which
            moves their scores.
        fast: make the prompt once and encode every frame once (``True``), send every clip through the whole processor
            (``False``), or the first where it is known to give the same (``auto``).
        cache_mb: most MiB of vision features kept on the model's device, the least recently used going first. Higher →
            fewer frames to encode again.

    Attributes:
        question: the prompt.
        prompt: its name, version and text, as part of the score cache's key.

    Raises:
        ValueError: a setting is out of its range, ``model`` is written as a path to a folder that is not there, or
            ``revision`` is given for a folder.
    """

    needs = "frames"

    def __init__(
        self,
        model: str,
        revision: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        attn_implementation: str | None = None,
        prompt: str | Prompt = "grid",
        frame_size: int | None = None,
        batch_clips: int = 8,
        video: bool | Literal["auto"] = "auto",
        fps: float = 1.0,
        fast: bool | Literal["auto"] = "auto",
        cache_mb: int = 1024,
    ) -> None:
        from vlmrb.scoring.vlm.loading import fingerprint, is_folder

        for name, value, least in (
            ("frame_size", frame_size, 1),
            ("batch_clips", batch_clips, 1),
            ("cache_mb", cache_mb, 0),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}")
        if not 0 < fps < float("inf"):
            raise ValueError(f"fps={fps} must be positive and finite")
        for name, choice in (("video", video), ("fast", fast)):
            if choice not in (True, False, "auto"):
                raise ValueError(f"{name}={choice!r} must be true, false or auto")
        local = is_folder(model)
        if local and revision is not None:
            raise ValueError(f"revision={revision!r} goes with an id on the hub: leave it out for a folder ({model})")
        self.model, self.revision = model, revision
        self.dtype, self.device, self.attn_implementation = dtype, device, attn_implementation
        self.question = make_prompt(prompt)
        self.frame_size, self.batch_clips = frame_size, batch_clips
        self.video, self.fps, self.fast, self.cache_mb = video, float(fps), fast, cache_mb

        question = self.question
        self.prompt = f"{question.name}/{question.version}: {question.text} ({question.yes}/{question.no})"
        folder = Path(model).expanduser()
        weights = fingerprint(folder) if local else f"{model}@{revision or 'main'}"
        self.name = (folder.resolve() if local else folder).name.lower()
        shown = "auto" if video == "auto" else "video" if video else "images"
        settings = [weights, dtype, attn_implementation or "auto", f"{self.fps:g}fps", shown]
        if local and (weights_size := weight_bytes(folder, dtype)) is not None:
            self.memory_bytes = weights_size + (cache_mb << 20)
        self.version = f"{_VERSION}:{':'.join(settings)}"

        self._path: ScoringPath | None = None
        self._plain: PlainPath | None = None
        self._fast: FastPath | None = None
        self._batch = batch_clips
        self._halvings = 0
        self._mass = CandidateMass(self.name)

    def setup(self) -> None:
        """Loads the model and says how it will be asked.

        Raises:
            ScorerError: a package or the model is missing, its tokenizer does not know the prompt's two words, or it
                cannot be shown clips as ``video`` and ``fast`` want it.
        """
        import torch

        from vlmrb.scoring.vlm.loading import load

        device = ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device
        self.attach(*load(self.model, self.revision, self.dtype, device, self.attn_implementation))

    def attach(self, processor: Any, model: Any) -> None:
        """Takes a model that is loaded already, in place of `setup`.

        Args:
            processor: as of ``AutoProcessor``.
            model: as of ``AutoModelForImageTextToText``, in evaluation mode.

        Raises:
            ScorerError: as in `setup`.
        """
        from vlmrb.scoring.vlm.answers import find_answer_tokens
        from vlmrb.scoring.vlm.chat import Chat
        from vlmrb.scoring.vlm.families import family_of, natural_frame_size
        from vlmrb.scoring.vlm.paths import PlainPath

        self._answers = find_answer_tokens(processor.tokenizer, self.question)
        family = family_of(model)
        natural = natural_frame_size(processor, family)
        if self.frame_size is None:
            self.frame_size = natural
        elif natural is not None and self.frame_size > natural and family.frame_size is None:
            logger.warning("scorer %s: shrinks every frame to %d pixels: set frame_size to that", self.name, natural)
        chat = Chat(processor, family, self.question.text, self.fps, video=True)
        chat = replace(chat, video=self._choose_video(chat))
        self._plain = PlainPath(model, chat)
        self._fast = self._make_fast_path(model, chat)
        self._path = self._fast or self._plain
        self._compared = self._fast is None or self.fast is True
        logger.info(
            "scorer %s: %s on %s in %s, clips as %s, frames up to %s pixels, %s path, prompt %r, answers %s",
            self.name,
            self.model,
            model.device,
            str(model.dtype).removeprefix("torch."),
            "videos" if chat.video else "lists of images",
            self.frame_size or "the environment's default",
            "fast" if self._fast else "plain",
            self.question.name,
            self._answers,
        )

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        """Asks the model about clips, once about each that looks different.

        Args:
            clips: B clips with a renderer; all L frames of each are shown, so a short one ends on its last frame.

        Returns:
            ``float32[B]``, r in [0, 1].

        Raises:
            ScorerError: the processor cannot take such frames.
            MemoryError: not even a single clip fits into memory.
        """
        import torch

        from vlmrb.scoring.vlm.unique_frames import unique_frames

        shown = unique_frames(clips, self.frame_size)
        scores, done = np.empty(len(shown.clips), np.float32), 0
        with torch.inference_mode():
            while done < len(scores):
                rows = shown.clips[done : done + self._batch]
                try:
                    scores[done : done + len(rows)] = self._ask(shown, rows)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    self._halve(len(rows), shown, error)
                else:
                    done += len(rows)
        return scores[shown.inverse]

    def stats(self) -> dict[str, float]:
        """Reports about the latest clips and about the work saved.

        Returns:
            ``mass``: mean probability of yes or no, in any spelling, as the first token of the answer; ``mass_min``:
            the lowest; ``frame_hits``: share of the frames shown so far that needed no encoding; ``tokens``: of the
            latest clip, its prompt included; ``batch_halvings``.
        """
        found = {"batch_halvings": float(self._halvings)}
        found |= self._mass.stats()
        if self._path is not None and self._path.tokens:
            found["tokens"] = float(self._path.tokens)
        if self._path is not None and self._fast is not None:
            found["frame_hits"] = self._fast.hit_share
        return found

    def forget(self) -> None:
        """Lets the features of all frames go."""
        if self._fast is not None:
            self._fast.forget()

    def close(self) -> None:
        """Lets go of the model."""
        self._path = self._plain = self._fast = None

    def _choose_video(self, chat: Chat) -> bool:
        if self.video is not False:
            if getattr(chat.processor, "video_processor", None) is not None and chat.shows("video"):
                return True
            if self.video is True:
                raise ScorerError(
                    f"{type(chat.processor).__name__} of {self.model} takes no videos: set scorer.init_args.video to "
                    "false or auto, and clips are shown as lists of images"
                )
        if not chat.shows("image"):
            raise ScorerError(f"the chat template of {self.model} takes neither videos nor images: take another model")
        return False

    def _make_fast_path(self, model: Any, chat: Chat) -> FastPath | None:
        from vlmrb.scoring.vlm.paths import FastPath
        from vlmrb.scoring.vlm.vision_cache import VisionCache

        if self.fast is False:
            return None
        if chat.family.encoder is None or not chat.video:
            why = "videos only" if chat.family.encoder else "families with a known vision encoder only"
            if self.fast is True:
                raise ScorerError(f"fast=true works with {why}: set scorer.init_args.fast to auto for {self.model}")
            logger.info("scorer %s: plain path, as the fast one works with %s", self.name, why)
            return None
        return FastPath(model, chat, VisionCache(self.cache_mb << 20))

    def _ask(self, shown: UniqueFrames, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        from vlmrb.scoring.vlm.answers import judge

        assert self._path is not None, "setup comes first"
        if not self._compared:
            self._compare(shown, rows[:1])
        scores, mass = judge(self._path.logits(shown, rows), self._answers)
        self._mass.note(mass.tolist())
        return scores.cpu().numpy()

    def _compare(self, shown: UniqueFrames, rows: NDArray[np.int64]) -> None:
        """Leaves the fast path at the first clip, if with this model and library it is not what it should be."""
        from vlmrb.scoring.vlm.answers import judge

        assert self._fast is not None
        assert self._plain is not None
        fast, plain = (judge(path.logits(shown, rows), self._answers)[0].item() for path in (self._fast, self._plain))
        self._compared = True
        if abs(plain - fast) > DRIFT:
            logger.warning(
                "scorer %s: the fast path gives %.4f where the processor gives %.4f, so every clip takes the "
                "plain path from here on; set scorer.init_args.fast to false to silence this",
                self.name,
                fast,
                plain,
            )
            self._path, self._fast = self._plain, None

    def _halve(self, clips: int, shown: UniqueFrames, error: Exception) -> None:
        """Makes batches half as large as the one that did not fit.

        Raises:
            MemoryError: it was a single clip.
        """
        import gc

        import torch

        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if clips == 1:
            frames, size = shown.clips.shape[1], "×".join(map(str, shown.frames.shape[1:3]))
            raise MemoryError(
                f"a single clip ({frames} frames of {size} pixels) does not fit into the memory left beside "
                f"{self.model} ({_first_line(error)}): set scorer.init_args.frame_size, cache_mb or dtype lower, or "
                "take a smaller model"
            ) from error
        self._batch = max(1, clips // 2)
        self._halvings += 1
        if self._halvings == 1:
            logger.warning(
                "scorer %s: out of memory with %d clips at once, going on with %d; set scorer.init_args.batch_clips",
                self.name,
                clips,
                self._batch,
            )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]
