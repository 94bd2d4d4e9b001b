"""Reads calls, reasoning and what is said in the text of an answer, as it comes."""
