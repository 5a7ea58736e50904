"""What stages and messages cost, measured in real steps."""
