"""The trainer that `penstock train` runs, and the models and data that it takes.

The files that do not need torch are separate (settings, choices, documents, model_sources, orders,
saved, launching), so that the command line can check all options before it starts any process.
"""
