"""Who computes rows, and what their columns say."""
