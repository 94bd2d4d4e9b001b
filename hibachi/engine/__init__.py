"""Plans meet arrays: the batch, its steps, and the thread that takes them."""
