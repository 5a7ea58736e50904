"""The table in docs/cutting.md of what became of each model type."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOUND = ROOT / "tests" / "data" / "hugging_face.json"
PAGE = ROOT / "docs" / "cutting.md"
BEGIN, END = "<!-- begin: scripts/hugging_face -->", "<!-- end: scripts/hugging_face -->"
TITLES = {
    "causal": "Causal LM",
    "masked": "Masked LM",
    "seq2seq": "Seq2seq LM",
    "image": "Image classification",
}
# Why types are not cut, in words.
NOTES = {
    "masked/ibert": "it asserts values of its quantised embeddings, outside its layers",
    "causal/reformer": "one autograd Function computes the gradients of all its layers",
    "masked/reformer": "one autograd Function computes the gradients of all its layers",
}


def load(path: Path = FOUND) -> dict[str, dict[str, Any]]:
    """Return what is known of each type, by category and type."""
    found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    return found


def is_trained(value: dict[str, Any]) -> bool:
    """Return whether the type was built in small and trained on one process."""
    return value["result"] not in ("untrained", "crashed")


def make_table(found: dict[str, dict[str, Any]]) -> str:
    """Return the counts by category, and the types that are not simply traced."""
    counts: Counter[tuple[str, str]] = Counter()
    for label, value in found.items():
        category = label.partition("/")[0]
        counts[category, "types"] += 1
        counts[category, "trained"] += is_trained(value)
        counts[category, "equal"] += value["result"] == "equal"
        if value["result"] == "equal":
            counts[category, value["way"]] += 1
    rows = {
        "model types": "types",
        "train in small on one process": "trained",
        "cut in two, every gradient equal": "equal",
        "… traced": "traced",
        "… between layers": "untraced",
    }
    lines = [
        f"| | {' | '.join(TITLES.values())} | All |",
        f"|---|{'--:|' * (len(TITLES) + 1)}",
    ]
    for title, key in rows.items():
        numbers = [counts[category, key] for category in TITLES]
        lines.append(f"| {title} | {' | '.join(map(str, [*numbers, sum(numbers)]))} |")
    untraced = [k for k, v in found.items() if v["result"] == "equal" and v["way"] == "untraced"]
    lines += ["", f"Cut between layers: {_listed(found, untraced)}.", ""]
    lines += _reasons("Trained on one process, but not cut:", found, is_wanted=_is_uncut)
    lines += ["", *_reasons("Not trained in small:", found, is_wanted=lambda v: not is_trained(v))]
    return "\n".join(lines) + "\n"


def _is_uncut(value: dict[str, Any]) -> bool:
    return is_trained(value) and value["result"] != "equal"


def _listed(found: dict[str, dict[str, Any]], labels: list[str]) -> str:
    return "; ".join(
        f"{TITLES[category].lower().replace('lm', 'LM')}: {', '.join(own)}"
        for category in TITLES
        if (
            own := [
                kind for each, _, kind in (x.partition("/") for x in labels) if each == category
            ]
        )
    )


def _reasons(title: str, found: dict[str, dict[str, Any]], is_wanted: Any) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for label, value in found.items():
        if is_wanted(value):
            reason = NOTES.get(label, _as_code(value.get("reason", "")))
            by_reason.setdefault(reason, []).append(label)
    lines = [f"- {', '.join(labels)}: {reason}" for reason, labels in by_reason.items()]
    return [title, "", *(lines or ["- none"])]


def _as_code(reason: str) -> str:
    return "`" + reason.replace("`", "'")[:160].strip() + "`"


def write_page(found: dict[str, dict[str, Any]]) -> None:
    """Put the table into the page."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{make_table(found)}{END}{after}")
