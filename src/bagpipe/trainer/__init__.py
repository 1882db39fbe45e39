"""The executor: prefetch, train and write back, overlapped; it decides nothing, plans do."""
