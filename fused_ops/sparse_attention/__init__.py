"""Sparse Flash Attention: MLA over the tokens the indexer chose."""
