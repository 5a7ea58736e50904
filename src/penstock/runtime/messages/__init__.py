"""Messages between stages: their forms, what can be sent, and the messages of one step."""
