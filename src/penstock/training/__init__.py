"""The language model, text and trainer that `penstock train` runs.

The files that do not need torch are separate (settings, text, orders, saved, launching), so that
the command line can check all options before it starts any process.
"""
