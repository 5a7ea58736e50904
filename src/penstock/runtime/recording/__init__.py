"""When each action of real steps began and ended, on all ranks by one clock."""
