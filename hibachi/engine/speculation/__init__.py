"""What may come next: tokens that a row computes beside its own and keeps if it draws them anyhow; how many of them."""
