"""A page to play with: what is changed on it is drawn and compared at once."""
