"""What is sent to and read from OpenAI-compatible servers: images as data URLs, log-probabilities by token number."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PREFIX = "token_id:"  # of a token that is given as its number
ROUNDING = 1e-3  # by which a log-probability may exceed 0


def read_tokens(content: bytes) -> list[tuple[str, float]]:
    """Reads the tokens listed for the answer's first place, with their log-probabilities.

    Raises:
        ValueError: the answer has no such list.
    """
    try:
        found = json.loads(content)
        first = found["choices"][0]["logprobs"]["content"][0]
        return [(str(entry["token"]), float(entry["logprob"])) for entry in first["top_logprobs"]]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        shown = " ".join(content[:200].decode(errors="replace").split())
        raise ValueError(f"no log-probabilities in the answer ({shown})") from error


def read_numbers(content: bytes) -> dict[int, float]:
    """Reads `read_tokens` by number; tokens that are given as text are left out.

    Raises:
        ValueError: a log-probability is not a number up to 0.
    """
    found = {int(token[len(PREFIX) :]): log for token, log in read_tokens(content) if token.startswith(PREFIX)}
    if not all(log <= ROUNDING for log in found.values()):  # written so that NaN is refused, too
        raise ValueError("an answer with log-probabilities above 0")
    return found


def read_ids(content: bytes, ids: Sequence[int]) -> dict[int, float]:
    """Reads the log-probabilities of these tokens.

    Raises:
        ValueError: one is missing, or is no log-probability.
    """
    found = read_numbers(content)
    missing = [number for number in ids if number not in found]
    if missing:
        raise ValueError(f"the answer leaves out tokens {missing}")
    return found


def png_url(frame: NDArray[np.uint8]) -> str:
    """Returns a frame ``uint8[H, W, 3]`` as a data URL."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
