"""Prints what was measured of memory, as the tables of the README."""

from typing import Any

COLUMNS = (
    "schedule",
    "ours",
    "torch's",
    "ours ÷ torch's",
    "predicted",
    "predicted ÷ ours",
    "between actions",
    "in an action",
    "resident, ours",
    "torch's",
)
CAP_COLUMNS = (
    "schedule",
    "stages on a rank",
    "searched with",
    "peak",
    "peak ÷ cap",
    "step, simulated",
    "step, measured",
    "÷ 1F1B",
)


def print_tables(record: dict[str, Any]) -> None:
    for setting in record["settings"]:
        print(f"\n{title_of(setting)}:\n")
        print_table(COLUMNS, [memory_row(*pair) for pair in setting["schedules"].items()])
    for found in record["capped"]:
        cap = megabytes(found["cap"])
        print(f"\n{title_of(found)}, under a cap of {cap} MB, 1F1B's peak:\n")
        print_table(CAP_COLUMNS, [cap_row(row, found) for row in found["rows"]])


def title_of(setting: dict[str, Any]) -> str:
    blocks = "each block checkpointed" if setting["is_checkpointed"] else "no checkpointing"
    return f"{setting['ranks']} ranks, width {setting['width']}, {blocks}"


def print_table(columns: tuple[str, ...], rows: list[list[str]]) -> None:
    print("|", " | ".join(columns), "|")
    print("|---|" + "--:|" * (len(columns) - 1))
    for row in rows:
        print("|", " | ".join(row), "|")


def memory_row(name: str, libraries: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The fullest rank of each column."""
    ours, torchs = (with_kept(libraries.get(library, [])) for library in ("ours", "torch"))
    peak, theirs = most(ours, "peak"), most(torchs, "peak")
    predicted, held = most(ours, "predicted"), most(ours, "held")
    return [
        name,
        megabytes(peak),
        megabytes(theirs),
        ratio(peak, theirs),
        megabytes(predicted),
        ratio(predicted, peak),
        megabytes(held),
        megabytes(most(ours, "working")),
        megabytes(most(ours, "resident")),
        megabytes(most(torchs, "resident")),
    ]


def with_kept(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Count what is kept from step to step as a part of the peak."""
    return [{**rank, "peak": rank["peak"] + rank["kept"]} for rank in ranks]


def cap_row(row: dict[str, Any], found: dict[str, Any]) -> list[str]:
    first = found["rows"][0]["step_s"]
    return [
        row["name"],
        str(row["stages_per_rank"]),
        ", ".join(map(megabytes, row["memory"])) or "-",
        megabytes(max(row["peaks"])),
        ratio(max(row["peaks"]), found["cap"]),
        f"{row['simulated_s'] * 1e3:.0f}",
        spread(row["step_s"]),
        ratio(row["step_s"][1], first[1]),
    ]


def most(ranks: list[dict[str, Any]], name: str) -> float:
    return max((rank[name] for rank in ranks), default=0.0)


def megabytes(amount: float) -> str:
    return f"{amount / 1e6:.2f}" if amount else "-"


def ratio(above: float, below: float) -> str:
    return f"{above / below:.2f}" if above and below else "-"


def spread(quartiles: list[float]) -> str:
    low, middle, high = (value * 1e3 for value in quartiles)
    return f"{middle:.0f} [{low:.0f}-{high:.0f}]"
