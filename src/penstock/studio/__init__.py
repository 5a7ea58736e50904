"""The studio: a page where changed numbers are drawn and compared at once."""
