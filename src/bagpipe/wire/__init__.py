"""What travels between processes: frames that are checked before anything is done with them, and how they travel."""
