"""The watch over ranks: a small process beside each rank notices which of them are dead."""
