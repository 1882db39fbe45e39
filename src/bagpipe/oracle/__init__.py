"""The oracle: all intelligence in one place, from the order of the data to one plan an iteration."""
