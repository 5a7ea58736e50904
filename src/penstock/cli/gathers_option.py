"""The policy of gathers that `--gathers` gives."""

from math import inf

from penstock.errors import OptionError
from penstock.ir import Schedule
from penstock.passes import Gathers, add_gathers, remove_gathers
from penstock.solver.gathered_search import GatherChoice

_AUTO, _NONE = "auto", "none"


def read_gathers(text: str | None) -> GatherChoice | None:
    """Return the policy that the option gives, `"auto"`, or None for no gathers.

    >>> str(read_gathers("at-most:2,ahead:0"))
    'at-most:2,ahead:0'
    """
    if text is None or text == _NONE:
        return None
    if text == _AUTO:
        return "auto"
    parts = [part.strip() for part in text.split(",")]
    words = [part for part in parts if ":" not in part]
    numbers = dict(part.split(":", 1) for part in parts if ":" in part)
    is_known = (
        len(words) + len(numbers) == len(parts)
        and words in ([], ["once"], ["per-need"])
        and numbers.keys() <= {"at-most", "ahead", "stages-ahead"}
        and not (words == ["once"] and "at-most" in numbers)
        and all(number.isdecimal() for number in numbers.values())
        and int(numbers.get("at-most", 1)) > 0
        and not {"ahead", "stages-ahead"} <= numbers.keys()
    )
    if not is_known:
        raise OptionError(
            f"--gathers is {text!r}. Expected once, per-need or at-most:K, with or without ahead:N "
            "or stages-ahead:N after a comma, such as at-most:2,ahead:0; or auto, or none."
        )
    return Gathers(
        most=int(numbers["at-most"]) if "at-most" in numbers else inf,
        frees_between=words == ["per-need"],
        ahead=int(numbers.get("ahead", 1)),
        stages_ahead=int(numbers.get("stages-ahead", 0)),
    )


def place_gathers(schedule: Schedule, text: str | None) -> Schedule:
    """Return the schedule with the gathers of the option in place of its own, if it is given."""
    if text is None:
        return schedule
    policy = read_gathers(text)
    if policy == "auto":
        raise OptionError(
            "--gathers is auto, which compares times within a memory. Use it with search or "
            "compare, or give a policy: once, per-need or at-most:K."
        )
    plain = remove_gathers(schedule)
    return plain if policy is None else add_gathers(plain, policy)
