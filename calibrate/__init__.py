"""From source weights to codes: data, forward, statistics, methods, the streaming loop."""
