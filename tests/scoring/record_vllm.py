"""Records what a real vLLM server answers, for test_openai_recorded.py to replay. Run by hand:

    python tests/scoring/record_vllm.py MODEL_FOLDER http://127.0.0.1:8200/v1 KEY > tests/scoring/recorded/vllm.json

MODEL_FOLDER is what the server has loaded; transformers score with it too, for the test to compare with.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import sys
from typing import Any

import numpy as np
import urllib3
from PIL import Image

from vlmrb.scoring.clips import ClipBatch

MODEL = "org/Small-VLM"
FRAME_SIZE = 64


class ShadesRenderer:
    """Draws three numbers as a square of one colour above a black one."""

    name = "shades"

    def render(self, snapshots: np.ndarray, frame_size: int | None = None) -> np.ndarray:
        side = frame_size or 8
        frames = np.zeros((*snapshots.shape[:-1], side, side, 3), np.uint8)
        frames[..., : side // 2, :, :] = snapshots[..., None, None, :]
        return frames

    def observe(self, snapshots: np.ndarray) -> np.ndarray:
        return snapshots


def recorded_clips() -> ClipBatch:
    snapshots = np.random.default_rng(0).integers(0, 256, (3, 4, 3))
    return ClipBatch(np.arange(3), snapshots, np.full(3, 4), ShadesRenderer())


def key_of(body: bytes) -> str:
    """Digests a request, its images by their pixels: encoders may pack them differently."""
    request = json.loads(body)
    for part in request["messages"][0]["content"]:
        if part["type"] == "image_url":
            data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
            part["image_url"] = np.asarray(Image.open(io.BytesIO(data))).tobytes().hex()
    return hashlib.blake2b(json.dumps(request, sort_keys=True).encode(), digest_size=8).hexdigest()


def main(folder: str, url: str, key: str) -> None:
    from vlmrb.scoring.hf import HFScorer
    from vlmrb.scoring.openai import PATH, OpenAIScorer

    exchanges: dict[str, dict[str, Any]] = {}

    def post(body: bytes, key: str) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        response = urllib3.request("POST", url + PATH, body=body, headers=headers, retries=False)
        return {"status": response.status, "answer": json.loads(response.data)}

    class Recording(OpenAIScorer):
        def _body(self, images: Any, as_ids: bool) -> bytes:
            body = super()._body(images, as_ids)
            exchanges[key_of(body)] = post(body, key)
            return body

    scorer = Recording(url, MODEL, tokenizer=folder, frame_size=FRAME_SIZE, api_key_env="RECORD_KEY")
    scorer.setup()
    scores = scorer.score(recorded_clips())
    local = HFScorer(folder, dtype="float32", device="cpu", frame_size=FRAME_SIZE, video=False)
    local.setup()
    body = scorer._body([], True)
    errors = {
        "no such model": post(body.replace(MODEL.encode(), b"org/Other"), key),
        "wrong key": post(body, "wrong"),
        "too many ids": post(body.replace(b'"logprob_token_ids": [', b'"logprob_token_ids": [' + b"1, " * 200), key),
    }
    version = json.loads(urllib3.request("GET", url.removesuffix("/v1") + "/version").data)["version"]
    ids, transformers = list(scorer._answers.ids), local.score(recorded_clips()).tolist()
    found = {"vllm": version, "ids": ids, "scores": scores.tolist(), "transformers": transformers}
    sys.stdout.write(json.dumps({**found, "exchanges": exchanges, "errors": errors}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
