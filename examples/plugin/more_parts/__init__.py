"""Parts for flatout: a model, a logger, a kind of data."""
