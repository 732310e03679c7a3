"""Hostile checkpoints, made by scripts: see `files` (one file) and `folders` (files, index and links)."""
