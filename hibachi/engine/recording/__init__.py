"""What a scheduler was told and what it planned: written down, and played again."""
