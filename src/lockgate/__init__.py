"""Let agents act without being able to leak."""
