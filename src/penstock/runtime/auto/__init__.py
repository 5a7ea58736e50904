"""The schedule that is found while training."""
