"""Two ways from frames to next-token logits: through the processor as everybody does, and with nothing done twice."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vlmrb.scoring.vlm.chat import Chat
from vlmrb.scoring.vlm.pixels import encoder_pixels, resized_to
from vlmrb.scoring.vlm.unique_frames import UniqueFrames
from vlmrb.scoring.vlm.vision_cache import Feature, VisionCache

ENCODER_FRAMES = 32  # frames in one call of the vision encoder: enough to fill a GPU, little memory
_OF_THE_TEXT = (
    "input_ids",
    "attention_mask",
    "mm_token_type_ids",
    "token_type_ids",
    "video_grid_thw",
    "image_grid_thw",
)


class Path(Protocol):
    """A way from clips to logits.

    Attributes:
        tokens: of the latest clip, with the question around it; 0 before the first.
    """

    tokens: int

    def logits(self, shown: UniqueFrames, rows: NDArray[np.int64]) -> torch.Tensor:
        """Returns the logits of the first token of the answer.

        Args:
            shown: the frames.
            rows: ``int64[k, L]``, clips as indices of frames.

        Returns:
            ``[k, V]`` on the model's device.
        """
        ...


class PlainPath:
    """Every frame of every clip through processor and model: works for any model, and is the fast path's measure."""

    def __init__(self, model: Any, chat: Chat) -> None:
        self._model = model
        self._chat = chat
        self.tokens = 0

    def logits(self, shown: UniqueFrames, rows: NDArray[np.int64]) -> torch.Tensor:
        """See `Path.logits`."""
        inputs = self._chat.inputs(shown.movie(rows))
        self.tokens = inputs["input_ids"].shape[1]
        return next_token(self._model, **to_model(self._model, inputs))


@dataclass(frozen=True)
class _Layout:
    text: dict[str, torch.Tensor]  # one clip's prompt, on the model's device
    positions: torch.Tensor | None  # [3, 1, S], of families that place tokens in time and space
    size: tuple[int, int] | None  # to which frames are resized


class FastPath:
    """The prompt is made once per clip shape, and each frame passes the vision encoder once in its life in the cache.

    Args:
        model: of a family with an encoder.
        chat: how it is asked, with videos.
        cache: keeps features.

    Attributes:
        shown: frames, or pairs of them, put to the model so far; the cache knows how many of them it had to encode.
    """

    def __init__(self, model: Any, chat: Chat, cache: VisionCache) -> None:
        assert chat.family.encoder is not None
        assert chat.video
        self._model, self._chat, self._cache = model, chat, cache
        self._encoder = chat.family.encoder
        self._layouts: dict[tuple[int, ...], _Layout] = {}
        self.tokens = 0
        self.shown = 0

    @property
    def hit_share(self) -> float:
        """Share of the frames shown so far that needed no encoding, in [0, 1]."""
        return 1.0 - self._cache.encoded / self.shown if self.shown else 0.0

    def forget(self) -> None:
        """Lets all features go and counts afresh."""
        self._cache.clear()
        self.shown = 0

    def logits(self, shown: UniqueFrames, rows: NDArray[np.int64]) -> torch.Tensor:
        """See `Path.logits`."""
        layout = self._layout(shown, rows)
        self.tokens = layout.text["input_ids"].shape[1]
        step, count = self._encoder.frames, len(rows)
        if missing := -rows.shape[1] % step:  # as the processors do
            rows = np.concatenate([rows, np.repeat(rows[:, -1:], missing, axis=1)], axis=1)
        units, inverse = np.unique(rows.reshape(-1, step), axis=0, return_inverse=True)  # [U, step], [k · L / step]
        self.shown += inverse.size

        def encode(missing: list[int]) -> list[Feature]:
            return self._encode(shown.frames[units[missing].reshape(-1)], layout)

        prefix = repr(layout.size).encode()
        keys = [prefix + b"".join(shown.keys[frame] for frame in unit) for unit in units.tolist()]
        features = self._cache.get(keys, encode)
        order = torch.as_tensor(inverse.reshape(-1), device=self._model.device)
        parts = [torch.stack(part)[order].flatten(0, 1) for part in zip(*features, strict=True)]  # [k · n · T, D] each
        text = {name: value.expand(count, *value.shape[1:]) for name, value in layout.text.items()}
        if layout.positions is not None:
            text["position_ids"] = layout.positions.expand(-1, count, -1)
        return next_token(self._model, **text, mm_encoder_outputs={self._encoder.slot: self._outputs(parts)})

    def _outputs(self, parts: list[torch.Tensor]) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        first, *deeper = [[part] if self._encoder.listed else part for part in parts]
        outputs: Any = BaseModelOutputWithPooling()
        outputs.pooler_output, outputs.deepstack_features = first, deeper
        return outputs

    def _layout(self, shown: UniqueFrames, rows: NDArray[np.int64]) -> _Layout:
        shape = (rows.shape[1], *shown.frames.shape[1:3])
        if shape not in self._layouts:
            inputs = self._chat.inputs(shown.movie(rows[:1]))
            text = to_model(self._model, {name: inputs[name] for name in _OF_THE_TEXT if name in inputs})
            size = resized_to(self._chat.processor, inputs) if self._encoder.sized_by_length else None
            self._layouts[shape] = _Layout(text, self._positions(text), size)
        return self._layouts[shape]

    def _positions(self, text: dict[str, torch.Tensor]) -> torch.Tensor | None:
        # The model would find them again for every clip of every batch, in Python and with the GPU waiting.
        find = getattr(self._model.model, "compute_3d_position_ids", None)
        return None if find is None else find(inputs_embeds=None, **text)

    def _encode(self, frames: NDArray[np.uint8], layout: _Layout) -> list[Feature]:
        chunk = ENCODER_FRAMES // self._encoder.frames * self._encoder.frames
        found: list[Feature] = []
        for start in range(0, len(frames), chunk):
            found += self._encode_chunk(frames[start : start + chunk], layout.size)
        return found

    def _encode_chunk(self, frames: NDArray[np.uint8], size: tuple[int, int] | None) -> list[Feature]:
        chat, model = self._chat, self._model
        pixels = to_model(model, encoder_pixels(chat.processor, chat.family, frames, size, model.device))
        encode = getattr(model.model, self._encoder.method)
        outputs = encode(**{name: pixels[source] for name, source in self._encoder.arguments.items()}, return_dict=True)
        count = len(frames) // self._encoder.frames
        parts = [outputs.pooler_output, *(getattr(outputs, "deepstack_features", None) or [])]
        whole = [part if isinstance(part, torch.Tensor) else torch.cat(list(part)) for part in parts]
        # Copies, so that a feature kept does not keep its whole batch in memory.
        return [
            tuple(part[i].clone() for part in [w.reshape(count, -1, w.shape[-1]) for w in whole]) for i in range(count)
        ]


def next_token(model: Any, **inputs: Any) -> torch.Tensor:
    """Runs one forward pass and returns the logits of the token after the prompt, ``[B, V]``."""
    arguments = inspect.signature(model.forward).parameters
    if "logits_to_keep" in arguments:
        inputs["logits_to_keep"] = 1
    return model(**inputs, use_cache=False).logits[:, -1]


def to_model(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Moves inputs to a model's device, real numbers to its dtype."""
    return {
        name: value.to(model.device, model.dtype if value.is_floating_point() else None)
        for name, value in inputs.items()
    }
