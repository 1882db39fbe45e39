"""The embedding server: holds rows for trainers, sharded by key, and knows nothing of how they are trained."""
