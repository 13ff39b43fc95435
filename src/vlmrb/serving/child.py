"""The program that serves: `python -m vlmrb.serving.child`, started by `vlmrb serve` only, in a session of its own."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from vlmrb.scoring.process import THREAD_VARIABLES, pack
from vlmrb.scoring.scorer import identity
from vlmrb.scoring.worker import die_with, guard_children
from vlmrb.settings import load_scoring

logger = logging.getLogger("vlmrb.serving.child")  # not __main__


def main(options: dict[str, Any], parent: int) -> int:
    """Serves until it is killed.

    Args:
        options: of `serve.serve`.
        parent: process id of the one that started this.
    """
    guard_children(())  # before anything starts a thread
    die_with(parent)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        _serve(**options)
    except Exception as error:
        from vlmrb.cli import one_line

        logger.error("vlmrb serve: error: %s", one_line(error))
        return 1
    return 0


def _serve(
    configs: list[str],
    folder: str,
    host: str,
    port: int,
    api_key_env: str,
    accelerator: str,
    devices: Any,
    workers_per_device: int,
    max_request_mb: float,
    batch_wait_ms: float,
    timeout_s: float,
    tls_cert: str | None,
    tls_key: str | None,
) -> None:
    scoring = load_scoring(configs)
    scorer, config = scoring.scorer, scoring.config
    assert scorer is not None  # `load_scoring` sees to it
    identity(scorer)
    if config.frames_per_clip is not None:
        logger.warning(
            "scoring.frames_per_clip=%d: whoever sends clips thins them, so it belongs into the configurations of the "
            "runs; here they are scored as they come",
            config.frames_per_clip,
        )
    pack(scorer, None)  # says in one line if it cannot travel to a worker
    if config.threads is not None:
        os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(config.threads)))

    from vlmrb.serving.app import Limits, make_server

    request_bytes = int(max_request_mb * 2**20)
    server = make_server(
        scorer,
        key=os.environ.get(api_key_env) or None,
        limits=Limits(request_bytes, 64 * request_bytes, timeout_s),
        info_file=Path(folder) / "scorer.json",
        batch_clips=config.batch_clips,
        batch_wait_s=batch_wait_ms / 1000,
        accelerator=accelerator,
        devices=devices,
        workers_per_device=workers_per_device,
    )
    if not server.app.state.front.workers:
        raise ValueError(
            f"accelerator={accelerator} with devices={devices} finds no device to score on: set accelerator=cpu, or "
            "look at `vlmrb doctor` for the GPU"
        )
    tls = {"ssl_certfile": tls_cert, "ssl_keyfile": tls_key} if tls_cert else {}
    workers = server.app.state.front.workers
    logger.info("loading scorer %r on %d worker%s", scorer.name, workers, "" if workers == 1 else "s")
    # One thread of this process talks HTTP, so that requests of a worker that died can be found and answered.
    server.run(
        host=host,
        port=port,
        num_api_servers=1,
        log_level="warning",
        generate_client_file=False,
        api_server_worker_type="thread",
        **tls,
    )


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), int(sys.argv[2])))
