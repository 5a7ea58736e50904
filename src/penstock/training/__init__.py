"""A language model, a text and a trainer: what `penstock train` runs.

What needs no torch is in files of its own (settings, text, orders, saved, launch), so that the
command line can check all options before it starts any process.
"""
