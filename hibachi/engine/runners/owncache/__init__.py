"""Models that keep a cache of their own: where rows and positions are in it, and how rows join, part and share."""
