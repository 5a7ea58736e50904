"""What travels between stages: its form, whether it can be sent, and one step's messages."""
