"""Compiled modules whose backward can be split."""

from penstock.compiling.module_compiler import compile

__all__ = ["compile"]
