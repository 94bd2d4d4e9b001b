"""The steps of one engine: where their time goes, how it grows, and what the machine could do at best."""
