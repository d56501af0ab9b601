"""GLM-5's three heavy operations, each with a definition in plain torch."""
