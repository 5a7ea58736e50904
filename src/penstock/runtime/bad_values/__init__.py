"""Losses and gradients that are not finite: where they appeared first, and steps without them."""
