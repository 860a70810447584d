"""Other people's files: tensors by name whatever wrote them, and the names that others give to the same."""
