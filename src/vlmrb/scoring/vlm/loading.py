"""Finds, identifies and loads models of the transformers library, and says in one line what is missing if it cannot."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

from vlmrb.scoring.scorer import ScorerError

HUB_TIMEOUT_S = 20.0
_WHOLE_BYTES = 16 << 20  # files up to this size are digested whole, larger ones by samples
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16
_FILES = ("*.safetensors", "*.bin", "*.json", "*.jinja", "*.model")


def is_folder(model: str) -> bool:
    """Says whether a model is a local folder rather than the id of one on the hub.

    Raises:
        ValueError: it is empty, or written as a path, but there is no such folder.
    """
    if not model.strip():
        raise ValueError("scorer model is empty: give a model's folder, or an id like org/name")
    path = Path(model).expanduser()
    if path.is_dir():
        return True
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ValueError(
            f"scorer model={model!r} is no folder; give one that holds config.json, or an id like org/name"
        )
    return False


def fingerprint(folder: Path) -> str:
    """Digests a model's folder: configuration, tokenizer, weights.

    Weights beyond 16 MiB are sampled at 64 places, which tells trained models apart and takes no time.
    """
    digest = hashlib.blake2b(digest_size=8)
    found = (file for pattern in _FILES for file in folder.glob(pattern))
    files = sorted(file for file in found if file.is_file() and not file.name.endswith(".index.json"))
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size};".encode())
        with file.open("rb") as stream:
            if size <= _WHOLE_BYTES:
                digest.update(stream.read())
                continue
            for place in range(_SAMPLES):
                stream.seek((size - _SAMPLE_BYTES) * place // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def load(model: str, revision: str | None, dtype: str, device: str, attn_implementation: str | None) -> tuple[Any, Any]:
    """Loads processor and model, from the local copy if there is one and else from the hub.

    Args:
        model: an id on the hub or a folder.
        revision: branch, tag or commit; ``None`` is the hub's main branch.
        dtype: as in torch, or ``auto`` for the one the weights were saved in.
        device: as in torch.
        attn_implementation: as in transformers; ``None`` leaves it the choice.

    Returns:
        Processor and model, ready for inference.

    Raises:
        ScorerError: a package is missing, or the model cannot be had or loaded, or not whole.
    """
    _need("transformers", "torchvision")
    import transformers

    transformers.utils.logging.disable_progress_bar()  # of loading; a download still shows one
    options: dict[str, Any] = {"dtype": dtype}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    folder = is_folder(model)
    place = str(Path(model).expanduser()) if folder else model

    def read(local: bool) -> tuple[Any, Any]:
        source = {"revision": revision or "main", "local_files_only": local}
        try:
            processor = transformers.AutoProcessor.from_pretrained(place, **source)
            loaded: Any = transformers.AutoModelForImageTextToText.from_pretrained(
                place, **source, **options, output_loading_info=True
            )
        except ImportError as error:
            remedy = f"{_line(error)}): pip install 'vlmrb[vlm]'"
            if attn_implementation is not None:
                remedy += ", or set scorer.init_args.attn_implementation to null"
            raise ScorerError(f"model {model} needs a package ({remedy}") from error
        found, report = loaded
        if missing := sorted(report["missing_keys"]):
            raise ScorerError(  # the library would go on with random numbers in their place
                f"model {model} lacks {len(missing)} of its weights, {missing[0]} first: fetch or copy all of its "
                "files again"
            )
        return processor, found

    try:
        processor, found = read(local=True)  # what is here needs no network, and stays what it is
    except ScorerError:
        raise
    except Exception as error:  # OSError, ValueError, SafetensorError, …: as many as there are ways to be wrong
        if folder:
            raise ScorerError(_cannot_load(model, error)) from error
        _ask_hub(model, revision, error)
        try:
            processor, found = read(local=False)
        except OSError as failure:
            raise ScorerError(_cannot_fetch(model, revision, failure)) from failure
        except ValueError as failure:
            raise ScorerError(_cannot_load(model, failure)) from failure
    if getattr(processor, "tokenizer", None) is None:
        raise ScorerError(f"model {model} has no processor with a tokenizer: it is no image-text-to-text model")
    processor.tokenizer.padding_side = "left"
    try:
        found = found.to(device)
    except Exception as error:  # out of memory, no such device
        raise ScorerError(f"model {model} cannot be put on device {device} ({_line(error)})") from error
    return processor, found.eval().requires_grad_(False)


def _need(*packages: str) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ScorerError(f"vision-language models need {' and '.join(missing)}: pip install 'vlmrb[vlm]'")


def _ask_hub(model: str, revision: str | None, local: Exception) -> None:
    """Makes sure that the hub can be reached and has the model: loading would try for minutes, file by file.

    Args:
        model: its id.
        revision: of it.
        local: why it could not be loaded from this machine.

    Raises:
        ScorerError: it cannot, or has not.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(model, revision=revision, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # whatever the network may do
        absent = isinstance(local, OSError)
        message = _cannot_fetch(model, revision, error) if absent else _cannot_load(model, local)
        raise ScorerError(message) from error


def _cannot_load(model: str, error: Exception) -> str:
    return f"model {model} cannot be loaded ({_line(error)})"


def _cannot_fetch(model: str, revision: str | None, error: Exception) -> str:
    at = f" --revision {revision}" if revision else ""
    return (
        f"model {model!r} is not on this machine and cannot be fetched ({_line(error)}): on a machine with network run "
        f"`hf download {model}{at}`, and copy its cache (HF_HOME) or give the folder as scorer.init_args.model"
    )


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
