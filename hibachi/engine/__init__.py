"""Plans meet arrays: the only floor with threads."""
