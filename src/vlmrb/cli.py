"""The command line: `fit` is LightningCLI's, the other verbs are plain functions."""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, get_origin, get_type_hints

log = logging.getLogger("vlmrb")

USAGE = """\
usage: vlmrb VERB [options]

  fit        train: vlmrb fit -c configs/minigrid/doorkey_6x6_dqn.yaml -c configs/replay/vlm.yaml
  evaluate   play episodes with a trained agent: vlmrb evaluate --ckpt runs/…/checkpoints/last.ckpt
  demo       five minutes on a laptop: VLM-RB beside uniform replay, with pictures, in runs/demo
  sweep      configurations × schemes × seeds, here or on Ray, resumable: vlmrb sweep studies/small_schemes.yaml
  report     runs beside each other and beside the paper, as tables, pictures and a page: vlmrb report RUNS… --out DIR
  serve      put a scorer behind HTTP: vlmrb serve -c configs/scorer/sprites.yaml; runs use configs/scorer/remote.yaml
  record     play episodes with a script or an agent for a run to start with: vlmrb fit --prefill FOLDER
  corpus     collect labelled clips of an environment, or of your own videos
  calibrate  judge scorers and prompts on a corpus before a run is paid for; chooses the threshold
  score      draw a scorer's answers along a video or an episode
  rules      rules as a priority: list predicates, propose rules by a language model, fit confidences
  doctor     check this machine: versions, GPU, rendering, disk; says what to install. With -c RUN.yaml: rehearse that
             run for a few seconds: does it fit, does the scorer keep up?

Every verb answers --help; `vlmrb fit --help` lists all settings. VLMRB_DEBUG=1 shows full tracebacks.
"""


def _fit(args: list[str]) -> int:
    if not _asks_only(args):
        from vlmrb.early import require_sound

        require_sound(args)
        files = [
            value if option in ("-c", "--config") else option.removeprefix("--config=")
            for option, value in zip(args, [*args[1:], ""], strict=True)
            if option in ("-c", "--config") or option.startswith("--config=")
        ]
        log.info("fit: loading PyTorch, then starting %s", " + ".join(files) or "a run with default settings")
    from vlmrb.fit import fit

    return fit(args)


def _asks_only(args: Sequence[str]) -> bool:
    """Says whether nothing is to be started: the settings are to be explained or shown."""
    return bool({"-h", "--help", "--print_config"} & {arg.partition("=")[0] for arg in args})


def _evaluate(args: list[str]) -> int:
    from vlmrb.verbs import evaluate

    return _call(evaluate, args)


def _demo(args: list[str]) -> int:
    from vlmrb.experiments.demo import demo

    return _call(demo, args)


def _sweep(args: list[str]) -> int:
    from vlmrb.experiments.run import sweep

    if args and not args[0].startswith("-"):
        args = ["--study", *args]
    return _call(sweep, args)


def _report(args: list[str]) -> int:
    if not _asks_only(args):
        log.info("report: loading its statistics, then reading runs")
    from vlmrb.experiments.report.command import report

    if args and not args[0].startswith("-"):
        args = ["--runs", *args]
    return _call(report, args)


def _serve(args: list[str]) -> int:
    from vlmrb.serving.serve import serve

    return _call(serve, args)


def _record(args: list[str]) -> int:
    from vlmrb.recording import record

    return _call(record, args)


def _corpus(args: list[str]) -> int:
    from vlmrb.calibration.verbs import corpus

    flags, rest = _take_section(args, "env")
    return _call(corpus, rest, env=flags)


def _calibrate(args: list[str]) -> int:
    from vlmrb.calibration.verbs import calibrate

    return _call(calibrate, args)


def _score(args: list[str]) -> int:
    from vlmrb.calibration.verbs import score

    return _call(score, args)


def _rules(args: list[str]) -> int:
    if args[:1] == ["propose"] and not _asks_only(args):
        log.info("rules propose: loading, then waiting for the model's answer")
    from jsonargparse import auto_cli

    from vlmrb.replay.rules.verbs import fit, predicates, propose

    verbs: dict[str, Any] = {"predicates": predicates, "propose": propose, "fit": fit}
    if args and args[0] in verbs:
        args = [args[0], *_lists(verbs[args[0]], args[1:])]
    return auto_cli(verbs, args=args, as_positional=False, prog="vlmrb rules", exit_on_error=False) or 0


def _doctor(args: list[str]) -> int:
    if any(arg == "-c" or arg.startswith("--config") for arg in args):
        if not _asks_only(args):
            from vlmrb.early import require_sound

            require_sound(args)
        from vlmrb.rehearsal import rehearse

        return rehearse(args)
    from vlmrb.doctor import doctor

    return _call(doctor, args)


VERBS: dict[str, Callable[[list[str]], int]] = {
    "fit": _fit,
    "evaluate": _evaluate,
    "demo": _demo,
    "sweep": _sweep,
    "report": _report,
    "serve": _serve,
    "record": _record,
    "corpus": _corpus,
    "calibrate": _calibrate,
    "score": _score,
    "rules": _rules,
    "doctor": _doctor,
}


def _call(function: Callable[..., int | None], args: list[str], **defaults: Any) -> int:
    """Parses ``args`` by the function's signature and docstring, and calls it; ``defaults`` go over its own."""
    from jsonargparse import auto_cli

    settings: dict[str, Any] = {"as_positional": False, "prog": f"vlmrb {function.__name__}", "exit_on_error": False}
    return auto_cli(function, args=_lists(function, args), set_defaults=defaults or None, **settings) or 0


def _take_section(args: Sequence[str], section: str) -> tuple[list[str], list[str]]:
    """Parts the flags of a section, each written as one word ``--SECTION.NAME=VALUE``, from the other arguments."""
    flags: list[str] = []
    others: list[str] = []
    waiting = False  # the last flag's value is still to come
    for arg in args:
        name, equals, _ = arg.partition("=")
        if name == f"--{section}" or name.startswith(f"--{section}."):
            flags.append(arg)
            waiting = not equals
        elif waiting and not arg.startswith("--"):
            flags[-1] += f"={arg}"
            waiting = False
        else:
            others.append(arg)
            waiting = False
    return flags, others


def _lists(function: Callable[..., Any], args: Sequence[str]) -> list[str]:
    """Lets lists be written as in a shell: ``--prompts a b``, ``-c a.yaml -c b.yaml`` (``-c`` means ``--configs``).

    A switch alone means true.
    """
    hints = get_type_hints(function).items()
    lists = {f"--{name}" for name, hint in hints if get_origin(hint) in (list, Sequence)}
    switches = {f"--{name}" for name, hint in hints if hint is bool}
    written: list[str] = []
    option = ""
    for arg, following in zip(args, [*args, "--"][1:], strict=True):
        if arg.startswith("-"):
            option = "--configs" if arg == "-c" and "--configs" in lists else arg
            if option in switches and following.startswith("-"):
                written.append(f"{option}=true")
            elif option not in lists or following.startswith("-"):
                written.append(option)
        elif option in lists and not arg.startswith("["):
            written.append(f"{option}+={arg}")
        else:
            written += [option, arg] if option in lists else [arg]
    return written


# What jsonargparse says around a reason when a value may be of several types.
_AROUND_A_REASON = (
    "Does not validate against any",
    "Subtypes:",
    "Errors:",
    "Given value",
    "Problem with given class_path",
    "Expected a <class 'NoneType'>",
    "Expected a path but",
)


def one_line(error: BaseException) -> str:
    """Returns an exception's message without line breaks.

    jsonargparse wraps what is wrong with a setting into everything else that it tried; of that, only the setting's name
    and the reasons are kept.
    """
    text = str(error)
    if "Does not validate against any of the Union subtypes" in text:
        lines = [line.strip().removeprefix("- ") for line in text.splitlines()]
        keys = [match[1] for line in lines if (match := re.match(r'Parser key "([^"]+)":', line))]
        if keys[:1] == ["model"] and keys[1:2] and keys[1] in ("env", "training", "replay"):
            keys = keys[1:]  # these sections are handed to the model
        reasons = [line for line in lines if line and not line.startswith(('Parser key "', *_AROUND_A_REASON))]
        if reasons:
            text = (".".join(keys) + ": " if keys else "") + "; ".join(dict.fromkeys(reasons))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        text += "; make room, then repeat the command (vlmrb fit: with --resume true)"
    return " ".join(text.split()) or type(error).__name__


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the process's exit code (2 for bad usage, 1 for a failure, 143 after SIGTERM)."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    verb = args.pop(0)
    if verb == "--version":
        from vlmrb import __version__

        print(__version__)
        return 0
    if verb not in VERBS:
        print(f"vlmrb: error: unknown verb {verb!r}; choose from {', '.join(VERBS)}", file=sys.stderr)
        return 2
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a user's own environments and scorers lie where the command is given
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("torch").setLevel(logging.WARNING)  # broken off while it loads, it reports on its caches
    try:
        return VERBS[verb](args)
    except (KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.__context__, KeyboardInterrupt):
            raise
        print(f"vlmrb {verb}: interrupted", file=sys.stderr)  # Lightning turns Ctrl-C into an exit with code 1
        return 130
    except Exception as error:
        if os.environ.get("VLMRB_DEBUG"):
            traceback.print_exc()
        print(f"vlmrb {verb}: error: {one_line(error)}", file=sys.stderr)
        return 2 if _is_usage_error(error) else 1


def _is_usage_error(error: Exception) -> bool:
    from argparse import ArgumentError

    return isinstance(error, ArgumentError)


if __name__ == "__main__":
    sys.exit(main())
