"""Who runs next, on which blocks: integers only, no array of a library, no clock, no thread."""
