"""A vision-language model behind an OpenAI-compatible server that tells log-probabilities of chosen tokens (vLLM).

Nothing but a model's own probabilities of yes and no makes a score. The usual ``top_logprobs`` will not do: neither
word need be among them, and there is no safe substitute. So the server must know ``logprob_token_ids``, and this
scorer finds out at the start whether it does.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.prompts import Prompt, make_prompt
from vlmrb.scoring.scorer import Scorer, ScorerError
from vlmrb.scoring.vlm.answers import CandidateMass
from vlmrb.scoring.vlm.openai_answers import png_url, read_ids, read_numbers, read_tokens
from vlmrb.serving.client import Client, RefusedError, RemoteError

if TYPE_CHECKING:
    from vlmrb.scoring.vlm.answers import AnswerTokens

logger = logging.getLogger(__name__)

_VERSION = 1  # part of the scorer's version: raise it when answers may change
MAX_IDS = 128  # what vLLM takes in one request
HUB_TIMEOUT_S = 20.0
PATH = "/chat/completions"


class OpenAIScorer(Scorer):
    """Asks a served vision-language model whether a clip shows success: r = P(yes) / (P(yes) + P(no)).

    A clip travels as a list of PNG images, which is lossless and the form in which servers agree best with the
    transformers library; videos are decoded and sampled differently everywhere. One token is generated.

    Args:
        urls: addresses of equal servers up to and including the version, ``http://127.0.0.1:8000/v1``.
        model: as the server calls it.
        tokenizer: folder or hub id of the model's tokenizer, which tells the numbers of yes and no; ``None`` is
            ``model``. Only the tokenizer's files are needed here.
        revision: branch, tag or commit of the tokenizer and, as far as this scorer's version is concerned, of the
            weights that the server has loaded; it cannot be asked for them.
        prompt: a name from `prompts.PROMPTS`, a question of your own, or a `Prompt` (for other words than yes and no).
        frame_size: pixels, upper bound of a frame's sides; ``None`` is the environment's default. Higher → finer
            detail, more tokens there; what a server makes of it is its processor's choice.
        extra_body: further fields of each request, such as ``mm_processor_kwargs`` or ``chat_template_kwargs``.
        api_key_env: environment variable with the servers' API key; if it is not set, none is sent.
        concurrency: clips asked about at a time. Higher → fuller batches on the server.
        wait_s: seconds to wait for a server at the start; 0 refuses at once. Keep it below
            ``scoring.startup_timeout_s``.
        deadline_s: seconds after which a batch counts as failed. Keep it below ``scoring.timeout_s``.
        timeout_s: seconds one attempt may take.
        backoff_s: seconds of the first pause before asking again; see `Client`.
        breaker_failures: failures in a row after which a server is left alone for a while.
        breaker_s: seconds for which it is.
        ca_file: certificates to trust instead of the system's, for https with a private authority.

    Attributes:
        question: the prompt.
        prompt: its name, version and text, as part of the score cache's key.

    Raises:
        ValueError: a setting cannot work.
    """

    needs = "frames"

    def __init__(
        self,
        urls: str | list[str],
        model: str,
        tokenizer: str | None = None,
        revision: str | None = None,
        prompt: str | Prompt = "grid",
        frame_size: int | None = 256,
        extra_body: dict[str, Any] | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        concurrency: int = 8,
        wait_s: float = 300.0,
        deadline_s: float = 100.0,
        timeout_s: float = 60.0,
        backoff_s: float = 0.5,
        breaker_failures: int = 3,
        breaker_s: float = 10.0,
        ca_file: str | None = None,
    ) -> None:
        if find_spec("urllib3") is None:
            raise ValueError("the openai scorer needs urllib3: pip install 'vlmrb[remote]'")
        for name, value, least in (
            ("frame_size", frame_size, 1),
            ("concurrency", concurrency, 1),
            ("wait_s", wait_s, 0),
            ("deadline_s", deadline_s, timeout_s),
        ):
            if value is not None and not value >= least:
                raise ValueError(f"openai scorer: {name}={value} must be at least {least:g}")
        self._client = Client(
            urls,
            api_key_env,
            timeout_s=timeout_s,
            backoff_s=backoff_s,
            breaker_failures=breaker_failures,
            breaker_s=breaker_s,
            ca_file=ca_file,
            connections=concurrency,
        )
        self.model, self.tokenizer, self.revision = model, tokenizer or model, revision
        self.question = make_prompt(prompt)
        self.frame_size = frame_size
        self.extra_body = extra_body or {}
        self.concurrency = concurrency
        self._wait_s, self._deadline_s = wait_s, deadline_s

        question = self.question
        self.prompt = f"{question.name}/{question.version}: {question.text} ({question.yes}/{question.no})"
        self.name = Path(model).name.lower()
        extra = json.dumps(self.extra_body, sort_keys=True)
        self.version = f"openai-{_VERSION}:{model}@{revision or 'served'}:{extra}"
        self._answers: AnswerTokens | None = None
        self._mass = CandidateMass(self.name)

    def setup(self) -> None:
        """Looks the two words up in the tokenizer, and makes sure that the server knows them by the same numbers.

        Raises:
            ScorerError: the tokenizer cannot be had or does not know the words; the server refuses the request, leaves
                the asked-for tokens out of its answer, or has another tokenizer.
            RemoteError: no server in time.
        """
        from vlmrb.scoring.vlm.answers import find_answer_tokens

        answers = find_answer_tokens(_load_tokenizer(self.tokenizer, self.revision), self.question)
        if len(answers.ids) > MAX_IDS:
            raise ScorerError(f"{len(answers.ids)} spellings of yes and no; servers take {MAX_IDS} at most")
        self._answers = answers
        self._check_servers(answers)
        logger.info(
            "scorer %s: %s at %s, prompt %r, answers %s",
            *(self.name, self.model, ", ".join(self._client.urls), self.question.name, answers),
        )

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        """Asks about clips, once about each that looks different.

        Args:
            clips: B clips with a renderer; all L frames of each are shown, so a short one ends on its last frame.

        Returns:
            ``float32[B]``, r in [0, 1].

        Raises:
            RemoteError: no usable answer within ``deadline_s``.
        """
        from vlmrb.scoring.vlm.unique_frames import unique_frames

        shown = unique_frames(clips, self.frame_size)
        images = [png_url(frame) for frame in shown.frames]
        ends = time.monotonic() + self._deadline_s

        def ask(rows: NDArray[np.int64]) -> tuple[float, float]:
            left = max(ends - time.monotonic(), 0.0)
            return self._judge(self._ask([images[row] for row in rows], left))

        with ThreadPoolExecutor(self.concurrency) as threads:
            asked = [threads.submit(ask, rows) for rows in shown.clips]
            try:
                found = np.array([future.result() for future in asked], np.float32)  # [K, 2]
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        self._mass.note(found[:, 1].tolist())
        return found[shown.inverse, 0]

    def stats(self) -> dict[str, float]:
        """Reports about the latest clips, and how the servers are doing.

        Returns:
            ``mass``: mean probability of yes or no, in any spelling, as the first token of the answer; ``mass_min``:
            the lowest; ``requests`` and ``failed_requests`` so far, ``servers_resting`` at present.
        """
        client = self._client
        found = {
            "requests": float(client.attempts),
            "failed_requests": float(client.failures),
            "servers_resting": float(client.resting),
        }
        found |= self._mass.stats()
        return found

    def close(self) -> None:
        """Closes connections."""
        self._client.close()

    def _body(self, images: Sequence[str], as_ids: bool) -> bytes:
        assert self._answers is not None, "setup() comes first"
        content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": image}} for image in images]
        content.append({"type": "text", "text": self.question.text})
        request = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": True,  # and no top_logprobs, which would take the place of the chosen tokens
            "logprob_token_ids": list(self._answers.ids),
            "return_tokens_as_token_ids": as_ids,
        }
        return json.dumps({**self.extra_body, **request}).encode()

    def _ask(self, images: Sequence[str], deadline_s: float) -> dict[int, float]:
        """Returns the log-probabilities of the answer's first token: id → log P."""
        assert self._answers is not None
        ids, body = self._answers.ids, self._body(images, as_ids=True)
        return self._client.ask(PATH, lambda content: read_ids(content, ids), body=body, deadline_s=deadline_s)

    def _judge(self, found: dict[int, float]) -> tuple[float, float]:
        """Returns r and the mass P(yes) + P(no)."""
        assert self._answers is not None
        yes = np.logaddexp.reduce([found[number] for number in self._answers.yes])
        no = np.logaddexp.reduce([found[number] for number in self._answers.no])
        return float(np.exp(yes - np.logaddexp(yes, no))), min(float(np.exp(np.logaddexp(yes, no))), 1.0)

    def _check_servers(self, answers: AnswerTokens) -> None:
        """Waits for a server, then looks at each that is there.

        Raises:
            ScorerError: see `setup`.
            RemoteError: no server in time.
        """
        blank = png_url(np.zeros((self.frame_size or 64, self.frame_size or 64, 3), np.uint8))
        by_number, by_text = (self._body([blank, blank], as_ids) for as_ids in (True, False))
        try:
            self._client.ask(PATH, read_tokens, body=by_number, deadline_s=self._wait_s, patient=False)
            unchecked: list[RemoteError] = []
            for client in self._client.each():
                try:
                    numbers = client.ask(PATH, read_numbers, body=by_number, deadline_s=0, patient=False)
                    texts = client.ask(PATH, read_tokens, body=by_text, deadline_s=0, patient=False)
                except RefusedError:
                    raise
                except RemoteError as error:
                    unchecked.append(error)
                else:
                    self._compare(answers, client.urls[0], numbers, [text for text, _ in texts])
        except RefusedError as error:
            raise ScorerError(f"scorer {self.name!r} is refused by its server: {error}") from error
        if len(unchecked) == len(self._client.urls):
            raise unchecked[0]
        for trouble in unchecked:
            logger.warning("scorer %s: a server could not be checked: %s", self.name, trouble)

    def _compare(self, answers: AnswerTokens, url: str, numbers: dict[int, float], texts: Sequence[str]) -> None:
        """Makes sure that a server means the same tokens by the same numbers: it lists them in one order both ways."""
        missing = [number for number in answers.ids if number not in numbers]
        if missing:
            raise ScorerError(
                f"{url} leaves tokens {missing} out of its answer: it does not know logprob_token_ids, without which "
                "there are no scores; serve the model with a version of vLLM that does"
            )
        words = {**dict.fromkeys(answers.yes, self.question.yes), **dict.fromkeys(answers.no, self.question.no)}
        meant = {number: text for number, text in zip(numbers, texts, strict=False) if number in words}
        other = {number: text for number, text in meant.items() if text.strip().lower() != words[number].lower()}
        if other or len(texts) != len(numbers):
            raise ScorerError(
                f"{url} has another tokenizer than {self.tokenizer!r}: there, tokens {other} should all be "
                f"{self.question.yes!r} or {self.question.no!r}; set the scorer's tokenizer to the served model's"
            )


def _load_tokenizer(tokenizer: str, revision: str | None) -> Any:
    """Loads a tokenizer from a folder or, its own files only, from the hub.

    Raises:
        ScorerError: it cannot be had.
    """
    if find_spec("transformers") is None:
        raise ScorerError("the openai scorer reads tokenizers with transformers: pip install 'vlmrb[vlm]'")
    from huggingface_hub import snapshot_download
    from transformers import AutoTokenizer

    try:
        folder = str(Path(tokenizer).expanduser())
        if not Path(folder).is_dir():
            folder = snapshot_download(
                tokenizer,
                revision=revision,
                allow_patterns=["*.json", "*.model", "*.txt", "*.jinja"],
                etag_timeout=HUB_TIMEOUT_S,
            )
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # as many as there are ways to be wrong
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ScorerError(
            f"tokenizer {tokenizer!r} cannot be had ({reason}): on a machine with network run `hf download {tokenizer} "
            "--include '*.json'`, and give the folder as scorer.init_args.tokenizer"
        ) from error
