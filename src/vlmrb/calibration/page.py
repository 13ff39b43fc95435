"""Writes a calibration report as an HTML page: no scripts, nothing from elsewhere, light or dark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from vlmrb.calibration.gallery import Shown
from vlmrb.calibration.report import verdicts

Gallery = Mapping[str, Sequence[Shown]]

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --line: #d8dee4; --paper: #f6f8fa; --card: #fff;
  --mark: #ddf4ff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --paper: #0d1117;
  --card: #161b22; --mark: #10304f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 2rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; } h2 { font-size: 1.25rem; margin: 0 0 .5rem; }
h3 { font-size: 1rem; margin: 1.25rem 0 .4rem; }
p { margin: .4rem 0; max-width: 60rem; } .soft, figcaption { color: var(--soft); } .note { padding-left: .6rem;
  border-left: 3px solid #bf8700; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 1.1rem 1.25rem;
  margin-top: 1.25rem; overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } caption { text-align: left; color: var(--soft);
  padding-bottom: .3rem; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; }
tr.best td { background: var(--mark); } td small { color: var(--soft); }
.side + picture { display: block; margin-top: 1.2rem; }
code, pre { font: 13px/1.45 ui-monospace, monospace; } pre { background: var(--paper); border: 1px solid var(--line);
  border-radius: 6px; padding: .6rem .8rem; white-space: pre-wrap; overflow-wrap: anywhere; }
blockquote { margin: .4rem 0; padding-left: .8rem; border-left: 3px solid var(--line); max-width: 60rem; }
img { max-width: 100%; height: auto; border-radius: 4px; }
.side { display: flex; flex-wrap: wrap; gap: 0 2.5rem; align-items: flex-start; }
.clips { display: flex; flex-wrap: wrap; gap: .8rem; } figure { margin: 0; width: 10rem; }
figure img { display: block; image-rendering: pixelated; } figcaption { font-size: .8rem; line-height: 1.3;
  margin-top: .2rem; }
"""

_METRICS = ("precision", "recall", "fpr", "fnr", "balanced_accuracy")
_NAMES = {"fpr": "FPR", "fnr": "FNR", "balanced_accuracy": "balanced accuracy"}
_KINDS = {
    "highest": "Highest scores",
    "lowest": "Lowest scores",
    "missed": "Most wrong: scored low although it happens",
    "false alarms": "Most wrong: scored high although it does not happen",
}


def render_page(report: Mapping[str, Any], galleries: Sequence[Gallery], overlays: Sequence[str], plots: str) -> str:
    """Renders the page.

    Args:
        report: as `build_report` returns it.
        galleries: for each scorer, the clips of each kind.
        overlays: for each scorer, the file name of its overlay.
        plots: folder of the pictures, seen from the page: ``roc.png``, ``scorer_0.png``, … and their dark twins.
    """
    corpus, label = report["corpus"], report["label"]
    counts = corpus["counts"]
    parts = [
        "<h1>Does the scorer understand this task?</h1>",
        f'<p class="soft">{counts["clips"]:,} clips of {corpus["clip_length"]} frames, drawn by '
        f"<code>{escape(corpus['renderer'])}</code>: {_counts(counts)}. Brackets hold 95 % bootstrap intervals, "
        "resampled by episode.</p>",
        *(f'<p class="note">{escape(note)}</p>' for note in corpus["notes"]),
        *(f'<p class="note">{escape(line)}</p>' for line in verdicts(report)),
        _overview(report, overlays, plots),
        *([_frontier(report["frontier"])] if "frontier" in report else []),
        *(_scorer(report, number, galleries[number], plots) for number in range(len(report["scorers"]))),
        "<section><h2>How this was made</h2>"
        f"<pre>{escape(corpus['command'])}\n{escape(report['command'])}</pre>"
        '<p class="soft">All numbers: <a href="report.json">report.json</a>; every score: '
        f'<a href="scores.csv">scores.csv</a>. τ was chosen by <b>{escape(label)}</b>.</p></section>',
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>vlmrb calibrate</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _counts(counts: Mapping[str, int]) -> str:
    names = {"success": "with strict success", "milestone": "with success or a milestone", "episodes": "episodes"}
    names |= {"distinct": "different clips"}
    if counts["milestone"] == counts["success"]:
        del names["milestone"]
    return ", ".join(f"{counts[key]:,} {name}" for key, name in names.items())


def _overview(report: Mapping[str, Any], overlays: Sequence[str], plots: str) -> str:
    label = report["label"]
    rows = []
    for scorer, overlay in zip(report["scorers"], overlays, strict=True):
        judged = scorer["by_label"][label]
        configured, best = judged["at_configured"], judged["at_best"]
        rows.append(
            [
                escape(scorer["label"]),
                _with_interval(judged["auc"], judged["auc_interval"]),
                _number(configured["threshold"], 2),
                _with_interval(configured["balanced_accuracy"], configured["intervals"]["balanced_accuracy"]),
                f"<b>{_threshold(best['threshold'])}</b>",
                _with_interval(best["balanced_accuracy"], best["intervals"]["balanced_accuracy"]),
                "from the cache" if scorer["clips_per_s"] is None else f"{scorer['clips_per_s']:,.0f}",
                f'<a href="{escape(overlay)}">{escape(overlay)}</a>',
            ]
        )
    head = [
        "scorer",
        "ROC AUC",
        "τ",
        "balanced accuracy",
        "best τ",
        "balanced accuracy (other half)",
        "clips/s",
        "overlay",
    ]
    roc = f"<div><h3>ROC</h3>{_picture(f'{plots}/roc.png', 'ROC curves of all scorers', 400)}</div>"
    below = f'<div class="side">{roc}{_pairs(report["pairs"])}</div>'
    return f"<section><h2>By {escape(label)}</h2>{_table(head, rows)}{below}</section>"


def _frontier(facts: Mapping[str, Any]) -> str:
    points = facts["points"]
    known = [name for name in ("tokens", "frame_hits", "peak_bytes") if any(p[name] is not None for p in points)]
    titles = {"tokens": "tokens a clip", "frame_hits": "frames not encoded", "peak_bytes": "GPU memory, GiB"}
    rows = []
    for point in points:
        extra = {
            "tokens": "–" if point["tokens"] is None else f"{point['tokens']:,.0f}",
            "frame_hits": _percent(point["frame_hits"]),
            "peak_bytes": _number(None if point["peak_bytes"] is None else point["peak_bytes"] / 2**30, 1),
        }
        rows.append(
            [
                escape(point["label"]),
                f"{point['clips_per_s']:,.3g}",
                _with_interval(point["ratio"], point["ratio_interval"], 2),
                _with_interval(point["auc"], point["auc_interval"]),
                _with_interval(point["loss"], point["loss_interval"]),
                _number(point["balanced_accuracy"]),
                *(extra[name] for name in known),
            ]
        )
    head = ["changed", "clips/s", f"× {escape(facts['base'])}", "ROC AUC", "below the best", "balanced accuracy"]
    table = _table([*head, *(titles[name] for name in known)], rows, marked=[point["chosen"] for point in points])
    settings = ", ".join(f"{name} {value}" for name, value in points[0]["settings"].items())
    tolerated = f"ROC AUC by {escape(facts['label'])} is not below the best one's by more than {facts['tolerance']:g}"
    turns = f"{facts['rounds']} rounds, in which all take turns with the same {facts['timed_clips']:,} clips"
    return (
        f"<section><h2>What a score costs</h2>{table}"
        f'<p class="soft">As configured: {escape(settings)}. One setting at a time is changed, then the best of each '
        f"are put together. Marked is the fastest whose {tolerated}, the whole interval counted: "
        f'<a href="frontier.yaml">frontier.yaml</a>. Speed is the median of {turns}, with no features kept from one to '
        "the next; its intervals are those of the rounds. All figures: "
        f'<a href="frontier.csv">frontier.csv</a>.</p>'
        f"{_picture('frontier.png', 'clips/s against ROC AUC', 760)}</section>"
    )


def _pairs(pairs: Sequence[Mapping[str, Any]]) -> str:
    if not pairs:
        return ""
    rows = [
        [f"{escape(pair['first'])} – {escape(pair['second'])}", _number(pair["spearman"]), _percent(pair["agreement"])]
        for pair in pairs
    ]
    head = ["pair", "Spearman", "same side of their best τ"]
    return f"<div><h3>How far they agree</h3>{_table(head, rows)}</div>"


def _scorer(report: Mapping[str, Any], number: int, gallery: Gallery, plots: str) -> str:
    scorer, label = report["scorers"][number], report["label"]
    prompt = "" if scorer["prompt"] is None else f"<blockquote>{escape(scorer['prompt'])}</blockquote>"
    tables = "".join(_by_label(name, judged) for name, judged in scorer["by_label"].items())
    thresholds = "".join(_thresholds(name, judged) for name, judged in scorer["by_label"].items())
    clips = "".join(_clips(kind, gallery[kind]) for kind in gallery)
    thinned = "" if scorer["frames_per_clip"] is None else f", {scorer['frames_per_clip']} frames of each clip"
    facts = f"<code>{escape(scorer['class_path'])}</code>, version {escape(scorer['version'])}{thinned}{_stats(scorer)}"
    return (
        f"<section><h2>{escape(scorer['label'])}</h2>"
        f'<p class="soft">{facts}</p>{prompt}'
        f'<div class="side">{tables}</div>'
        f"{_picture(f'{plots}/scorer_{number}.png', f'scores, reliability and balanced accuracy by {label}', 1180)}"
        f'<h3>Thresholds</h3><div class="side">{thresholds}</div>{clips}</section>'
    )


def _stats(scorer: Mapping[str, Any]) -> str:
    return "".join(f"; {escape(name.replace('_', ' '))} {value:.4g}" for name, value in scorer["stats"].items())


def _by_label(name: str, judged: Mapping[str, Any]) -> str:
    configured, best = judged["at_configured"], judged["at_best"]
    rows = [
        [
            _NAMES.get(metric, metric),
            _with_interval(configured[metric], configured["intervals"][metric]),
            _with_interval(best[metric], best["intervals"][metric]),
        ]
        for metric in _METRICS
    ]
    rows.append(["clips above τ", _percent(configured["share_positive"]), _percent(best["share_positive"])])
    head = [escape(name), f"τ = {_threshold(configured['threshold'])}", f"best τ = {_threshold(best['threshold'])}"]
    auc = _with_interval(judged["auc"], judged["auc_interval"])
    caption = (
        f"{judged['positives']:,} clips with {escape(name)}; AUC {auc}; calibration error "
        f"{_number(judged['calibration_error'])}<br>best τ chosen on {best['chosen_on']:,} clips, reported on the "
        f"other {best['reported_on']:,}"
    )
    return _table(head, rows, caption)


def _thresholds(name: str, judged: Mapping[str, Any]) -> str:
    lines = judged["thresholds"]
    best = max(lines, key=lambda line: line["balanced_accuracy"])
    rows = [[f"{b['lower']:.2f}", _percent(b["share"]), _number(b["balanced_accuracy"])] for b in lines]
    return _table(
        [f"τ, {escape(name)}", "share of scores", "balanced accuracy"],
        rows,
        "share in the bin from τ on; balanced accuracy at τ",
        [line is best for line in lines],
    )


def _clips(kind: str, clips: Sequence[Shown]) -> str:
    title = f"<h3>{_KINDS[kind]}</h3>"
    if not clips:
        return f'{title}<p class="soft">None.</p>'
    figures = "".join(
        f'<figure><img src="clips/{escape(shown.file)}" alt="clip {shown.clip}" loading="lazy">'
        f"<figcaption>{shown.score:.3f} · {escape(shown.happens)}<br>clip {shown.clip}</figcaption></figure>"
        for shown in clips
    )
    return f'{title}<div class="clips">{figures}</div>'


def _table(head: Iterable[str], rows: Sequence[Sequence[str]], caption: str = "", marked: Sequence[bool] = ()) -> str:
    lines = [f"<caption>{caption}</caption>"] if caption else []
    lines.append("<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>")
    for number, row in enumerate(rows):
        best = ' class="best"' if number < len(marked) and marked[number] else ""
        lines.append(f"<tr{best}>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>")
    return "<table>" + "".join(lines) + "</table>"


def _picture(path: str, text: str, width: int) -> str:
    dark = path.replace(".png", "_dark.png")
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{path}" alt="{escape(text)}" width="{width}"></picture>'
    )


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _threshold(value: float) -> str:
    return f"{value:.4f}".rstrip("0").rstrip(".")


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _with_interval(value: float | None, interval: Sequence[float | None], digits: int = 3) -> str:
    low, high = interval
    number = _number(value, digits)
    return number if low is None else f"{number} <small>[{_number(low, digits)}, {_number(high, digits)}]</small>"
