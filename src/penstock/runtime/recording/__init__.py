"""The start and end of each action of real steps, for all ranks on one clock."""
