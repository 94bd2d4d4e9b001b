"""Plans meet arrays: what each step computes, and what becomes of it."""
