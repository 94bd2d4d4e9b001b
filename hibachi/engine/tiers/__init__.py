"""Where blocks of the cache go when they leave the device: stores, and what is kept in them. No array, no engine."""
