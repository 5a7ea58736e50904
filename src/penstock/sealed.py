"""Objects that refuse assignments that would have no effect."""

import difflib
from typing import Any, ClassVar

from penstock.errors import AssignmentError


class Sealed:
    """An object that, once sealed, accepts only assignments that have an effect.

    These are to the names in `settable` and to properties with a setter. Private attributes belong
    to the object itself, and a subclass outside Penstock may add attributes of its own.
    """

    settable: ClassVar[tuple[str, ...]] = ()
    """The public attributes that can be set between steps."""

    def _seal(self, theirs: frozenset[str] = frozenset()) -> None:
        """Seal the object, at the end of `__init__`; the attributes that it has now are its own.

        `theirs` are the exceptions: attributes that a subclass had set before.
        """
        self.__dict__["_sealed"] = frozenset(self.__dict__) - theirs

    def __setattr__(self, name: str, value: Any) -> None:
        if "_sealed" in self.__dict__ and not self._can_set(name):
            raise self._refusal(name)
        super().__setattr__(name, value)

    def _can_set(self, name: str) -> bool:
        if name in self.settable:
            return True
        declared = getattr(type(self), name, None)
        if isinstance(declared, property):
            return declared.fset is not None
        if name in self.__dict__["_sealed"]:
            return name.startswith("_")
        return not type(self).__module__.startswith("penstock.")

    def _refusal(self, name: str) -> AssignmentError:
        kind = type(self).__name__
        can_be = f"Set {', '.join(self.settable)}, or make" if self.settable else "Make"
        can_be = f"{can_be} a new {kind}."
        if hasattr(self, name):
            return AssignmentError(
                f"{name} of a {kind} cannot be changed: the assignment would have no effect. "
                f"{can_be}"
            )
        known = [own for own in dir(self) if not own.startswith("_")]
        close = difflib.get_close_matches(name, known, n=1)
        perhaps = f"; did you mean {close[0]}" if close else ""
        return AssignmentError(
            f"a {kind} has no attribute {name!r}, so the assignment would have no effect{perhaps}. "
            f"{can_be}"
        )
