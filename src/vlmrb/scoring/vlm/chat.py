"""Clips as a conversation: frames and a question through a processor's own chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.scorer import ScorerError
from vlmrb.scoring.vlm.families import Family
from vlmrb.scoring.vlm.memory import is_out_of_memory

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Chat:
    """How a model is asked.

    Attributes:
        processor: the model's.
        family: its family.
        question: the prompt's text.
        fps: frames per second that the model is told; some families write the times into the prompt.
        video: clips go in as a video; else as a list of images.
    """

    processor: Any
    family: Family
    question: str
    fps: float
    video: bool

    def shows(self, kind: str) -> bool:
        """Says whether the chat template puts a ``video`` or an ``image`` into the prompt.

        Raises:
            ScorerError: there is no chat template.
        """
        text = {"type": "text", "text": self.question}
        return self._rendered([{"type": kind}, text]) != self._rendered([text])

    def inputs(self, movies: NDArray[np.uint8]) -> dict[str, torch.Tensor]:
        """Returns what the model's forward takes, on the CPU.

        Args:
            movies: ``uint8[B, L, H, W, 3]``, 0–255; equal lengths, so nothing is padded.

        Raises:
            ScorerError: the processor cannot take such frames.
        """
        import torch

        options: dict[str, Any] = {"padding": True}
        if self.video:
            options |= {"do_sample_frames": False, "video_metadata": [self.metadata(movie) for movie in movies]}
            options |= self.family.video_arguments
        else:
            options |= self.family.image_arguments
        try:
            found = self.processor.apply_chat_template(
                [self._conversation(movie) for movie in movies],
                tokenize=True,
                add_generation_prompt=True,
                return_dict=True,
                return_tensors="pt",
                processor_kwargs=options,
            )
        except Exception as error:  # each processor refuses in its own way
            if is_out_of_memory(error):
                raise
            size = "×".join(map(str, movies.shape[2:4]))
            what = "a video" if self.video else "a list of images"
            raise ScorerError(
                f"{type(self.processor).__name__} cannot take {what} of {movies.shape[1]} frames of {size} pixels "
                f"({_line(error)}): change scorer.init_args.frame_size or video"
            ) from error
        inputs: Mapping[str, Any] = found
        return {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}

    def metadata(self, movie: NDArray[np.uint8]) -> dict[str, Any]:
        """Describes a clip ``uint8[L, H, W, 3]`` as a video that was read whole."""
        length, height, width = movie.shape[:3]
        return {
            "total_num_frames": length,
            "fps": self.fps,
            "width": width,
            "height": height,
            "duration": length / self.fps,
            "frames_indices": list(range(length)),
        }

    def _rendered(self, content: list[dict[str, Any]]) -> str:
        try:
            return self.processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True
            )
        except Exception as error:  # templates are foreign code
            raise ScorerError(
                f"the chat template of {type(self.processor).__name__} cannot be used ({_line(error)}): take a "
                "model that was tuned to answer questions (often called instruct or it)"
            ) from error

    def _conversation(self, movie: NDArray[np.uint8]) -> list[dict[str, Any]]:
        if self.video:
            shown = [{"type": "video", "video": np.ascontiguousarray(movie)}]
        else:
            shown = [{"type": "image", "image": np.ascontiguousarray(frame)} for frame in movie]
        return [{"role": "user", "content": [*shown, {"type": "text", "text": self.question}]}]


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
