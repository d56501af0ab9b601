"""What to do to each role, one YAML a chip."""
