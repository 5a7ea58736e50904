"""Optional packages, which pip installs as extras, and the error if one is missing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock.errors import PipelineError


@contextmanager
def needed_by(
    what: str, packages: Sequence[str], *, extra: str, error: type[PipelineError]
) -> Iterator[None]:
    """Turn a failed import of `packages` in this context into `error`, which says how to install.

    >>> from penstock.errors import DrawError
    >>> with needed_by("A picture", ["pencil", "paper"], extra="draw", error=DrawError):
    ...     import pencil
    Traceback (most recent call last):
    penstock.errors.DrawError: A picture needs pencil and paper: pip install 'penstock[draw]'
    """
    try:
        yield
    except ImportError as exc:
        if isinstance(exc, PipelineError):
            raise
        message = f"{what} needs {_listed(packages)}: pip install 'penstock[{extra}]'"
        is_absent = isinstance(exc, ModuleNotFoundError) and _root(exc.name) in packages
        raise error(message if is_absent else f"{message} (the import failed: {exc})") from exc


def _listed(packages: Sequence[str]) -> str:
    *first, last = packages
    return f"{', '.join(first)} and {last}" if first else last


def _root(module: str | None) -> str:
    return (module or "").partition(".")[0]
