"""From raw files to shards: read in blocks, columns parsed, categories numbered, all in bounded memory."""
