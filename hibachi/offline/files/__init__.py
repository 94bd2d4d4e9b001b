"""Rows from files, and into one."""
