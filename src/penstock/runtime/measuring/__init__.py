"""The costs of stages and messages, measured in real steps."""
