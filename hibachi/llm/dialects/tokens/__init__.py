"""Tokens of any kind over HTTP: arrays in bodies, what is asked with them, and the forms of an answer."""
