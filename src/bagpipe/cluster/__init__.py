"""The roles of a run in processes of their own."""
