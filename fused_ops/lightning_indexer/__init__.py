"""Lightning Indexer: which past tokens a query attends."""
